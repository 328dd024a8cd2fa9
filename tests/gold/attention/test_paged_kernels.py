"""The paged kernels without a GPU: in Triton's interpreter, and compiled for Hopper."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.paged.triton import attention  # noqa: E402
from trapline.gold.errors import DTypeError, UnsupportedError  # noqa: E402

HERE = Path(__file__).parent


def test_interpreted_kernels_agree_with_the_torch_path(tmp_path, run_script):
    run_script(HERE / "interpret_paged.py", tmp_path, TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "differences.json").read_text())
    assert len(found) == 15
    for name, differences in found.items():
        assert differences["appended"] == 0.0, name
        assert differences["attended"] < (1e-5 if name.endswith("float32") else 6e-3), name
    lost = json.loads((tmp_path / "lost.json").read_text())
    assert sorted(lost) == ["int4", "int8"]
    for sides in lost.values():
        assert sides == [[True, False] * 6] * 2


@pytest.mark.parametrize(
    ("which", "count"), [("some", 16), pytest.param("all", 477, marks=pytest.mark.full)]
)
def test_kernels_compile_for_hopper(which, count, compiled):
    """For sm_90, within its shared memory, with keys and values copied ahead of their use."""
    found = compiled(HERE / "compile_paged.py", which)
    assert len(found) == count
    for entry in found:
        assert entry["copies"] > 0 or entry["kernel"] == "append_kernel", entry


@pytest.mark.parametrize("operation", ["attention_operator", "append_operator"])
def test_kernels_are_launched_on_the_device_of_their_tensors(operation, monkeypatch, entered):
    """A launch goes to the current device, which may be another one than the tensors'."""
    seen = []
    monkeypatch.setattr(attention, "require", lambda *_: seen.append(list(entered)))
    monkeypatch.setattr(attention, "require_gpu", lambda _: None)
    first = torch.zeros(0, 2, 4)
    pages = torch.zeros(2, 3, 2, 16, 4)
    empty = torch.zeros(0).long()
    more = {
        "attention_operator": (empty, empty, None, 1, *[None] * 3, 0, 0.0, 1.0, 0, None, first),
        "append_operator": (empty, *[None] * 4),
    }
    rows = (first, first) if operation == "append_operator" else (first,)
    getattr(attention, operation)(*rows, *pages, *more[operation])
    assert seen
    assert all(len(there) == 1 and there[0] is first for there in seen)
    assert entered == []


def test_unsupported_tensors_are_named():
    with pytest.raises(UnsupportedError, match="heads 320 wide"):
        attention.require(torch.zeros(1, 1, 320))
    with pytest.raises(UnsupportedError, match="not adjacent"):
        attention.require(torch.zeros(1, 64, 2).transpose(1, 2))
    with pytest.raises(UnsupportedError, match="four at a time"):
        attention.require(torch.zeros(1, 1, 6), torch.zeros(1, 1, 16, 6, dtype=torch.int8))
    with pytest.raises(DTypeError, match="float64"):
        attention.require(torch.zeros(1, 1, 64).double())


@pytest.mark.parametrize("columns", [1, 5, 8, 60, 64, 65])
def test_tree_masks_are_read_in_words_of_eight(columns):
    tree = torch.rand(3, columns, generator=torch.manual_seed(0)) < 0.5
    for given in (
        tree,
        tree.repeat_interleave(2, 1)[:, ::2],
        torch.cat([tree] * 8, 1)[:, :columns],
    ):
        words = attention.in_eights(given)
        assert words.dtype == torch.int64
        if columns >= 8:
            assert torch.equal(words.view(torch.bool), tree[:, :8])
        whole = words.as_strided((3, columns // 8), (words.stride(0), 1)).contiguous()
        assert torch.equal(whole.view(torch.bool), tree[:, : columns // 8 * 8])
