"""Compiles kernels of every family for sm_90 without a GPU; test_versions.py reads the result.

Few and small ones, Gluon's first: a release of Triton that renames something is noticed quickly.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import triton

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    made = {family: len(list(compiled)) for family, compiled in families().items()}
    (folder / "compiled.json").write_text(json.dumps({"triton": triton.__version__, **made}))


def families() -> dict[str, Iterator[object]]:
    return {
        "attention": attention(),
        "paged attention": paged_attention(),
        "norms": norms(),
        "ternary": iter([script("ternary").few(20, 1, "bf16", True)]),
        "softmax_topk": script("softmax_topk").launches(128, 4096, 1, "fp32"),
        "decoder": decoder(),
        "tree_decoding": iter([script("tree_decoding", "compile_tree_kernel").compiled(16)]),
        "beam_search": iter([script("beam_search", "compile_advance").compiled(0, 0)]),
    }


def attention() -> Iterator[object]:
    from trapline.gold.attention.dense.triton import forward
    from trapline.gold.attention.dense.triton.tiles import Tile

    # Three Gluon kernels are too long for an ordinary run; this one has what all of them use.
    yield from script("attention", "compile_hopper").forward_compiled("bf16", 64, False, 512)
    tile = Tile(64, 64, 4, 2)
    yield script("attention").compiled(forward.forward_kernel, 64, 64, tile, {})


def paged_attention() -> Iterator[object]:
    paged = script("attention", "compile_paged")
    yield paged.decoded("bf16", 0, 128, 16, 4)
    yield paged.appended("bf16", 1, 128, 16, set())


def norms() -> Iterator[object]:
    """The kernels whose configurations come first, and Gluon's."""
    found = script("norms")
    kinds = {kernel: (kernel, fixed, warps) for kernel, fixed, warps in found.configurations(2)}
    for kernel, *one in kinds.values():
        if kernel.is_gluon() or kernel.__name__ == "add_parts_kernel":
            yield found.compiled(kernel, *one, "bf16")


def decoder() -> Iterator[object]:
    step = script("decoder", "compile_step")
    yield step.small("embed_kernel", {"BLOCK": 1024})
    yield step.small("argmax_kernel", {"BLOCK": 512})


def script(family: str, name: str = "compile_kernels") -> ModuleType:
    path = HERE / family / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{family}_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


if __name__ == "__main__":
    main(Path(sys.argv[1]))
