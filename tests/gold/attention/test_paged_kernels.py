"""The paged kernels without a GPU: interpreted, compiled for Hopper, tile sizes, counters."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import completion_counters  # noqa: E402
from trapline.gold.attention.paged import PagedProblem  # noqa: E402
from trapline.gold.attention.paged.hopper import decode as hopper  # noqa: E402
from trapline.gold.attention.paged.triton import attention, pages  # noqa: E402
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
    ("which", "count"), [("some", 15), pytest.param("all", 477, marks=pytest.mark.full)]
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
    seen, module = [], pages if operation == "append_operator" else attention
    monkeypatch.setattr(module, "require", lambda *_: seen.append(list(entered)))
    monkeypatch.setattr(module, "require_gpu", lambda _: None)
    first = torch.zeros(0, 2, 4)
    stored = torch.zeros(2, 3, 2, 16, 4)
    empty = torch.zeros(0).long()
    more = {
        "attention_operator": (empty, empty, None, 1, *[None] * 3, 0, 0.0, 1.0, 0, None, first),
        "append_operator": (empty, *[None] * 4),
    }
    rows = (first, first) if operation == "append_operator" else (first,)
    getattr(module, operation)(*rows, *stored, *more[operation])
    assert seen
    assert all(len(there) == 1 and there[0] is first for there in seen)
    assert entered == []


def test_unsupported_tensors_are_named():
    with pytest.raises(UnsupportedError, match="heads 320 wide"):
        pages.require(torch.zeros(1, 1, 320))
    with pytest.raises(UnsupportedError, match="not adjacent"):
        pages.require(torch.zeros(1, 64, 2).transpose(1, 2))
    with pytest.raises(UnsupportedError, match="four at a time"):
        pages.require(torch.zeros(1, 1, 6), torch.zeros(1, 1, 16, 6, dtype=torch.int8))
    with pytest.raises(DTypeError, match="float64"):
        pages.require(torch.zeros(1, 1, 64).double())


@pytest.mark.parametrize("columns", [1, 5, 8, 60, 64, 65])
def test_tree_masks_are_read_in_words_of_eight(columns):
    tree = torch.rand(3, columns, generator=torch.manual_seed(0)) < 0.5
    for given in (
        tree,
        tree.repeat_interleave(2, 1)[:, ::2],
        torch.cat([tree] * 8, 1)[:, :columns],
    ):
        words = pages.in_eights(given)
        assert words.dtype == torch.int64
        if columns >= 8:
            assert torch.equal(words.view(torch.bool), tree[:, :8])
        whole = words.as_strided((3, columns // 8), (words.stride(0), 1)).contiguous()
        assert torch.equal(whole.view(torch.bool), tree[:, : columns // 8 * 8])


# --- Hopper's decoding: supported problems, and tile sizes ---------------------------------------

#: Shared memory of a multiprocessor in bytes, and what each program reserves.
SHARED, OWN = 228 << 10, 1 << 10
PLAIN, INT8, FP8, INT4 = range(4)


def ring(kind, D, config):
    """Bytes of a program's tiles."""
    row = {PLAIN: 2 * D, INT4: D // 2}.get(kind, D)
    return config.stages * config.positions * 2 * row


@pytest.mark.parametrize(("kind", "D"), hopper.CONFIGS)
def test_configured_programs_fit_a_multiprocessor(kind, D):
    for R in (1, 4, 8):
        config = hopper.config_for(kind, D, R)
        # Gates, and a few hundred bytes to move scales between lanes.
        assert config.programs * (ring(kind, D, config) + OWN + 1024) <= SHARED


@pytest.mark.parametrize(("kind", "D"), hopper.CONFIGS)
@pytest.mark.parametrize("P", [16, 32, 48, 64, 128])
def test_boxes_lie_on_one_page_and_are_at_most_128_bytes_wide(kind, D, P):
    config = hopper.config_for(kind, D, 4)
    _, _, positions, columns = hopper.box_of(kind, D, P, config.positions)
    assert P % positions == 0 == config.positions % positions
    assert positions % 8 == 0  # what a swizzle repeats after
    width = columns * (2 if kind == PLAIN else 1)
    assert width <= 128
    assert {PLAIN: 2 * D, INT4: D // 2}.get(kind, D) % width == 0


def test_unsupported_heads_and_widths():
    for kind, D in hopper.CONFIGS:
        assert hopper.config_for(kind, D, 8) is not None
        assert hopper.config_for(kind, D, 9) is None
    for kind, D in [*itertools.product(range(4), (96, 256)), (FP8, 64)]:
        assert hopper.config_for(kind, D, 4) is None


def test_strides_must_be_multiples_of_16_bytes():
    pages = torch.zeros(3, 2, 16, 64, dtype=torch.int8)
    assert hopper.fits(pages)
    assert hopper.fits(pages.transpose(1, 2))
    assert not hopper.fits(pages[..., 1:])
    assert not hopper.fits(torch.zeros(3, 2, 16, 72, dtype=torch.int8)[..., :64])
    assert not hopper.fits(pages[:0])
    assert not hopper.fits(pages[:1].expand(3, -1, -1, -1))


def test_unsupported_problems_of_hopper_are_named():
    q, pages = torch.zeros(32, 32, 128).half(), torch.zeros(64, 8, 16, 128).half()
    table, lengths = torch.zeros(32, 2).int(), torch.ones(32).int()
    options = None, 1, None, None, None, 0, 0.0, 0.1, 0, None
    problem = PagedProblem(q, pages, pages, table, lengths, *options, q)
    assert "device" in hopper.supports(problem, PLAIN)
    assert "one query" in hopper.supports(problem._replace(max_q=2), PLAIN)
    assert "window" in hopper.supports(problem._replace(window=5), PLAIN)


# --- completion counters: launches that may run at the same time get different ones ---------------


@pytest.fixture
def counters(monkeypatch):
    monkeypatch.setattr(completion_counters, "RING_SIZE", 10)
    monkeypatch.setattr(completion_counters, "KEPT_SIZE", 10)
    return completion_counters.CompletionCounters(torch.device("cpu"))


def places(*taken):
    return [one.storage_offset() for one in taken]


def test_launches_take_turns(counters):
    taken = [counters.take(4, keep=False) for _ in range(4)]
    assert places(*taken) == [0, 4, 0, 4]
    assert all(len(one) == 4 and not one.any() for one in taken)
    assert counters.take(11, keep=False) is None


def test_counters_of_a_graph_are_not_reused(counters):
    first, second = (counters.take(4, keep=True) for _ in range(2))
    assert places(first, second) == [0, 4]
    assert counters.take(4, keep=True) is None
    assert counters.take(4, keep=True) is None
    assert first.untyped_storage().data_ptr() != counters.take(4, keep=False).data_ptr()


def test_counters_are_made_once_for_a_device(monkeypatch):
    monkeypatch.setattr(completion_counters, "RING_SIZE", 10)
    monkeypatch.setattr(completion_counters, "_made", {})
    like = torch.zeros(1)
    one, other, long = (
        completion_counters.completion_counters(count, like) for count in (3, 3, 20)
    )
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert places(one, other) == [0, 3]
    assert len(long) == 20
    assert not long.any()


def test_threads_do_not_get_the_same_counters(monkeypatch):
    """Each counter is handed out once before the ring comes round."""
    monkeypatch.setattr(completion_counters, "RING_SIZE", 4000)
    shared = completion_counters.CompletionCounters(torch.device("cpu"))
    with ThreadPoolExecutor(4) as pool:
        taken = pool.map(lambda _: shared.take(2, keep=False), range(2000))
    assert sorted(places(*taken)) == list(range(0, 4000, 2))
