"""Options with which kernels are compiled and launched."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline import gold
from trapline.gold import device
from trapline.gold.device import launched


def test_launches_fuse_products_and_sums_unless_they_say_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(device, "fusion_is_default", lambda: False)
    kernel = launched(SimpleNamespace(run=lambda *given, **options: seen.append((given, options))))
    kernel.run(1, grid=(2,), num_warps=4)
    kernel.run(1, grid=(2,), enable_fp_fusion=False)
    assert seen == [
        ((1,), {"grid": (2,), "num_warps": 4, "enable_fp_fusion": True}),
        ((1,), {"grid": (2,), "enable_fp_fusion": False}),
    ]


def test_options_are_left_alone_where_fusion_is_the_default(monkeypatch):
    seen = []
    monkeypatch.setattr(device, "fusion_is_default", lambda: True)
    kernel = launched(SimpleNamespace(run=lambda *given, **options: seen.append((given, options))))
    kernel.run(1, grid=(2,), num_warps=4)
    assert seen == [((1,), {"grid": (2,), "num_warps": 4})]


def test_launch_goes_to_the_device_of_the_first_tensor(monkeypatch, entered):
    """A tensor on cuda:1 while cuda:0 is current; a descriptor counts as its tensor."""
    seen = []
    tensor = SimpleNamespace(is_cuda=True, get_device=lambda: 1)
    monkeypatch.setattr(device, "current_device", lambda: len(entered))
    monkeypatch.setattr(device, "ensure_context", lambda number: None)
    kernel = launched(SimpleNamespace(run=lambda *_, **options: seen.append(list(entered))))
    kernel.run(3, tensor, grid=(1,))
    kernel.run(SimpleNamespace(base=tensor), grid=(1,))
    monkeypatch.setattr(device, "current_device", lambda: 1)
    kernel.run(tensor, grid=(1,))
    assert seen == [[tensor], [tensor], []]
    assert entered == []


def launches_of(tree):
    """Names in `name[grid](…)`."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    marked = (call.value for call in calls if isinstance(call, ast.Subscript))
    return {name.id for name in marked if isinstance(name, ast.Name)}


def test_every_kernel_that_is_launched_is_decorated():
    """Named `…_kernel`, or launched where it is defined."""
    found, bare = 0, []
    for path in Path(gold.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        used = launches_of(tree)
        for node in (one for one in tree.body if isinstance(one, ast.FunctionDef)):
            decorators = [ast.unparse(one) for one in node.decorator_list]
            jitted = any(".jit" in one for one in decorators)
            if jitted and (node.name.endswith("_kernel") or node.name in used):
                found += 1
                bare += [] if decorators[0] == "launched" else [f"{path.name}: {node.name}"]
    assert found >= 60
    assert bare == []
