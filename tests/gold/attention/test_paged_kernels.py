"""The paged kernels: right in the interpreter, compilable for a Hopper GPU. No GPU is needed."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.paged.triton import attention as kernels_paged  # noqa: E402
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
def test_kernels_compile_for_hopper(which, count, tmp_path, run_script):
    """For sm_90, within its shared memory, with keys and values copied ahead of their use."""
    run_script(
        HERE / "compile_paged.py", tmp_path, TRITON_INTERPRET="0", PAGED_CONFIGURATIONS=which
    )
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert len(compiled) == count
    assert all(entry["shared"] <= 232448 for entry in compiled), compiled
    for entry in compiled:
        assert entry["copies"] > 0 or entry["kernel"] == "append_kernel", entry


@pytest.mark.parametrize("operation", ["_attention", "_append"])
def test_kernels_are_launched_where_their_tensors_are(operation, monkeypatch, entered):
    """Whichever device is current: a launch would go there, and read the other one's addresses."""
    seen = []
    monkeypatch.setattr(kernels_paged, "require", lambda *_: seen.append(list(entered)))
    first = torch.zeros(0, 2, 4)
    pages = torch.zeros(2, 3, 2, 16, 4)
    empty = torch.zeros(0).long()
    more = {
        "_attention": (empty, empty, None, 1, *[None] * 3, 0, 0.0, 1.0, 0, None, first),
        "_append": (empty, *[None] * 4),
    }
    rows = (first, first) if operation == "_append" else (first,)
    getattr(kernels_paged, operation)(*rows, *pages, *more[operation])
    assert seen
    assert all(len(there) == 1 and there[0] is first for there in seen)
    assert entered == []


def test_what_the_kernels_do_not_take_is_named():
    with pytest.raises(UnsupportedError, match="up to 256 wide, not 320"):
        kernels_paged.require(torch.zeros(1, 1, 320))
    with pytest.raises(UnsupportedError, match="beside each other"):
        kernels_paged.require(torch.zeros(1, 64, 2).transpose(1, 2))
    with pytest.raises(UnsupportedError, match="four at a time"):
        kernels_paged.require(torch.zeros(1, 1, 6), torch.zeros(1, 1, 16, 6, dtype=torch.int8))
    with pytest.raises(DTypeError, match="float64"):
        kernels_paged.require(torch.zeros(1, 1, 64).double())


@pytest.mark.parametrize("columns", [1, 5, 8, 60, 64, 65])
def test_a_tree_is_read_in_words_of_eight(columns):
    tree = torch.rand(3, columns, generator=torch.manual_seed(0)) < 0.5
    for given in (
        tree,
        tree.repeat_interleave(2, 1)[:, ::2],
        torch.cat([tree] * 8, 1)[:, :columns],
    ):
        words = kernels_paged.in_eights(given)
        assert words.dtype == torch.int64
        if columns >= 8:
            assert torch.equal(words.view(torch.bool), tree[:, :8])
        whole = words.as_strided((3, columns // 8), (words.stride(0), 1)).contiguous()
        assert torch.equal(whole.view(torch.bool), tree[:, : columns // 8 * 8])
