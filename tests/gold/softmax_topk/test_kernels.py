"""The Triton kernels: right in the interpreter, compilable for a Hopper GPU. No GPU is needed."""

import itertools
from pathlib import Path
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

HERE = Path(__file__).parent
#: Short and long rows; more rows than processors and fewer; ties; tails; winners in one group.
#: For the interpreter's sake a row is long from 513 logits on, and cut into tiles of 1024.
PROBLEMS = [
    ((3, 1), 1, "normal"),
    ((2, 97), 97, "coarse"),
    ((0, 50), 3, "normal"),
    ((1, 500), 1, "zeros"),
    ((2, 512), 7, "normal"),
    ((2, 480), 33, "coarse"),
    ((1, 500), 8, "rising"),
    ((2, 300), 5, "not a number"),
    ((5, 1000), 17, "coarse"),
    ((3, 1001), 3, "one stride"),
    ((2, 2000), 20, "masked"),
    ((2, 1200), 2, "nothing"),
    ((1, 3001), 8, "constant"),
    ((1, 2000), 100, "rising"),
    ((1, 1100), 80, "normal"),
    ((1, 5025), 64, "normal"),
    ((1, 1024), 30, "not a number"),
    ((1, 600), 1, "normal"),
    ((1, 1600), 600, "normal"),
]
#: More rows than processors, of which there is one here: rows of more than 128 stay in the cache.
#: Of the longest, chunks of three tiles are read again, and all of a row of equal logits. Then come
#: so many that four warps select, and so many that one kernel reads and selects. Rows that lie side
#: by side begin and end with a multiple of 16 bytes.
MANY = [
    ((2, 301), 5, "normal"),
    ((2, 129), 129, "coarse"),
    ((2, 500), 70, "normal"),
    ((2, 480), 100, "constant"),
    ((2, 500), 33, "not a number"),
    ((2, 300), 80, "not a number"),
    ((2, 400), 90, "masked"),
    ((2, 5001), 40, "normal"),
    ((2, 5001), 9, "constant"),
    ((5, 600), 20, "normal"),
    ((13, 1501), 20, "coarse"),
    ((28, 1300), 9, "not a number"),
    ((2, 504), 20, "side by side"),
    ((2, 480), 90, "side by side"),
    ((28, 1304), 30, "side by side"),
    ((2, 9000), 70, "side by side"),
]
#: Candidates for more than 85 are sorted: those of 16-bit logits in rows that stay in the cache as
#: words of 32 bits, those of longer rows of bfloat16 by keys of 32 bits. Where the largest logits
#: come late, the first 2048 tell little.
SORTED = [
    ((2, 500), 91, "not a number", 1, "float16"),
    ((2, 480), 96, "side by side", 1, "float16"),
    ((2, 490), 99, "masked", 1, "float16"),
    ((2, 300), 90, "nothing", 1, "float16"),
    ((2, 300), 97, "zeros", 1, "bfloat16"),
    ((2, 2301), 120, "late", 1, "float16"),
    ((2, 505), 300, "normal", 1, "bfloat16"),
    ((2, 480), 130, "coarse", 1, "bfloat16"),
    ((2, 400), 90, "masked", 1, "float32"),
    ((2, 480), 100, "constant", 1, "float16"),
    ((2, 1304), 120, "side by side", 1, "bfloat16"),
    ((2, 1200), 90, "constant", 1, "bfloat16"),
    ((2, 1301), 100, "coarse", 1, "float32"),
    ((2, 1201), 130, "not a number", 1, "bfloat16"),
    ((2, 1100), 200, "normal", 1, "float16"),
]
PROBLEMS = [*((*problem, 4) for problem in PROBLEMS), *((*problem, 1) for problem in MANY)]
DTYPES = ("float32", "float16")
PROBLEMS = [(*problem, DTYPES[number % 2]) for number, problem in enumerate(PROBLEMS)] + SORTED
#: How far values in these dtypes may be from the ones before rounding.
ROUNDING = {"float32": 0.0, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_interpreted_kernels_agree_with_float64(interpreted, number):
    with np.load(interpreted / f"{number}.npz") as kept:
        found = {name: kept[name] for name in kept.files}
    _, k, _, _, dtype = PROBLEMS[number]
    log_probs, indices, lse, row_max = in_float64(found["x"], k, found["each"])
    assert np.array_equal(found["indices"], indices)
    want = log_probs if number % 4 > 1 else np.exp(log_probs)
    rtol = 1e-5 + ROUNDING[dtype]
    np.testing.assert_allclose(found["values"], want, rtol=rtol, atol=1e-4)
    np.testing.assert_allclose(found["lse"], lse, rtol=1e-6, atol=1e-4)
    assert np.array_equal(found["row_max"], row_max, equal_nan=True)


@pytest.mark.parametrize(("rows", "lag"), [(1, 1), (5, 5), (40, 9), (4096, 594)])
def test_selection_waits_only_for_earlier_programs(rows, lag):
    """Every row is read once and selected from once, by a program with a higher number."""
    from trapline.gold.softmax_topk.triton.long_rows_small_k import role

    plain = FunctionType(
        role.fn.__code__, {"tl": SimpleNamespace(where=lambda c, a, b: a if c else b)}
    )
    found = [plain(number, rows, lag) for number in range(2 * rows)]
    read = {row: number for number, (row, selects) in enumerate(found) if not selects}
    selected = {row: number for number, (row, selects) in enumerate(found) if selects}
    assert list(read) == list(selected) == list(range(rows))
    assert all(read[row] < selected[row] for row in range(rows))


def test_one_kernel_reads_and_selects_only_where_it_was_faster():
    from trapline.gold.softmax_topk.triton.work_partition import long_plan

    lags = {
        (rows, V, k, width): long_plan(rows, V, k, V, width, 132).lag
        for rows in (512, 1024, 4096)
        for V in (32000, 128256)
        for k in (64, 256)
        for width in (4, 8)
    }
    assert {case: lag for case, lag in lags.items() if lag} == {
        (4096, 32000, 64, 4): 594,
        (4096, 32000, 64, 8): 1188,
    }


def plans_of_large_k():
    """Every plan with room for candidates, of many rows and of long ones, and its threads."""
    from trapline.gold.softmax_topk.triton import work_partition as plans

    sizes = [65, 128, 256, 257, 500, 512, 513, 700, 1024]
    for k, width in itertools.product(sizes, (4, 8)):
        for vocabulary in (2049, 10000, 16384):
            if not plans.is_narrow(k, width):
                plan = plans.many_plan(vocabulary, k, vocabulary, width)
                yield plan, 32 * plan.warps
        for rows, vocabulary in itertools.product((1, 20, 80, 600), (16385, 50257, 1 << 20)):
            plan = plans.long_plan(rows, vocabulary, k, vocabulary, width, 132)
            yield plan, 32 * plan.select_warps


def test_candidates_have_as_many_cells_as_they_use():
    """One each where they are ranked at once; sorted ones share, in whole steps of all threads.

    Few rows of k beyond 512 had half of the cells that their ranks counted in.
    """
    for plan, threads in plans_of_large_k():
        assert plan.buckets % threads == 0
        if plan.sorts:
            assert plan.cap % (min(2, plan.cap // threads) * threads) == 0
        else:
            assert plan.buckets == plan.cap


def test_runs_sort_what_is_nearly_in_order():
    """Exchanges sort any zeros and ones, so anything; two rows of runs what is near its place."""
    from trapline.gold.softmax_topk.triton.narrow import EACH, exchanges

    each = EACH.value
    pairs = exchanges(each)
    for ones in range(1 << each):
        assert exchanged([ones >> i & 1 for i in range(each)], pairs) == descending(ones, each)
    source = np.random.default_rng(0)
    for _ in range(100):
        # A key moves by at most half a run if it is sorted by its place plus up to that much.
        near = np.argsort(np.arange(240) + source.random(240) * each / 2)
        keys = list(240 - near)
        for first in (0, each // 2):
            for start in range(first, 240 - each + 1, each):
                keys[start : start + each] = exchanged(keys[start : start + each], pairs)
        assert keys == sorted(keys, reverse=True)


def descending(ones, each):
    return [1] * ones.bit_count() + [0] * (each - ones.bit_count())


def exchanged(keys, pairs):
    for i, j in pairs:
        if keys[i] < keys[j]:
            keys[i], keys[j] = keys[j], keys[i]
    return keys


def in_float64(logits, k, each):
    """What the kernels promise, also where the oracle refuses: NaN first, and NaN answers."""
    x = logits.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        row_max = np.max(x, axis=1, initial=-np.inf)
        origin = np.where(row_max == -np.inf, 0.0, row_max)
        total = np.exp((x - origin[:, None]) / each[:, None]).sum(1)
        indices = np.argsort(-np.where(np.isnan(x), np.inf, x), axis=1, kind="stable")[:, :k]
        best = np.take_along_axis(x, indices, axis=1)
        log_probs = (best - row_max[:, None]) / each[:, None] - np.log(total)[:, None]
        return log_probs, indices, row_max / each + np.log(total), row_max


#: (rows, V, k, dtype): between them every kernel, both ways to choose, one split and many.
ORDINARY = [(128, 4096, 1, "fp32"), (64, 8192, 8, "bf16"), (512, 128256, 32, "bf16")]
ORDINARY += [(6400, 10000, 1024, "fp32"), (6400, 10000, 1024, "bf16"), (4096, 32000, 64, "bf16")]
ORDINARY += [(1280, 50257, 1024, "bf16"), (20, 128256, 1024, "fp32")]
ORDINARY += [(6400, 10000, 64, "bf16"), (512, 128256, 256, "bf16"), (6400, 10001, 777, "fp16")]
EVERY = [
    (rows, V, k, dtype)
    for dtype in ("fp32", "bf16", "fp16")
    for rows, V in (
        *((128, 97), (128, 1000), (64, 8192), (16, 12000), (6400, 10000)),
        *((1, 131072), (512, 128256), (4096, 32000)),
    )
    for k in (1, 8, 64, 1024)
    if k <= V
]


@pytest.mark.parametrize(
    "problems",
    [ORDINARY, *(pytest.param([one], marks=pytest.mark.full) for one in EVERY)],
    ids=["ordinary", *("x".join(map(str, one)) for one in EVERY)],
)
def test_kernels_compile_for_hopper(compiled, problems):
    """For sm_90, within its shared memory."""
    assert len(compiled(HERE / "compile_kernels.py", problems)) >= len(problems)


@pytest.mark.parametrize(("capability", "let_in"), [((8, 0), "NOT"), ((9, 0), "AFTER")])
def test_kernels_wait_for_each_other_only_where_the_gpu_can(monkeypatch, capability, let_in):
    """Before Hopper there is no such instruction: the kernel would not compile."""
    import torch

    from trapline.gold import device as gold_device
    from trapline.gold.softmax_topk.triton import topk as kernels

    few = SimpleNamespace(device=torch.device("cuda", 0), shape=(1, 1000))
    monkeypatch.setattr(gold_device.torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(kernels, "processors", lambda _: 132)
    assert kernels.launch_of(few) == int(getattr(kernels, let_in))


@pytest.mark.parametrize("vocabulary", [100, 20000])
def test_kernels_launch_on_the_device_of_their_logits(monkeypatch, entered, vocabulary):
    """Whichever device is current: a launch would go there, and read the other one's addresses."""
    import torch

    from trapline.gold.softmax_topk.triton import topk as kernels

    launched = []
    for name in ("run_short", "run_many", "run_long"):
        monkeypatch.setattr(kernels, name, lambda *_: launched.append(list(entered)))
    logits = torch.zeros(1, vocabulary)
    kernels._softmax_topk(logits, 3, 1.0, None, False)
    assert [one[0] is logits for one in launched] == [True]
    assert entered == []


def test_too_long_rows_are_rejected():
    import torch

    from trapline.gold.errors import RangeError
    from trapline.gold.softmax_topk.triton import topk as kernels
    from trapline.gold.softmax_topk.triton import work_partition

    logits = torch.empty((1, kernels.LONGEST + 1), device="meta")
    with pytest.raises(RangeError, match=str(kernels.LONGEST)):
        kernels.require(logits, 3)
    for k in (1, 64, 1024):
        assert work_partition.long_plan(1, kernels.LONGEST, k, kernels.LONGEST, 4, 132).tile > 0
