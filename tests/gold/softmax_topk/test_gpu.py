"""The kernels on a GPU, every configuration against float64. Skips where there is no GPU.

With TRAPLINE_GPU_RECORD=FILE the number of comparisons and the worst errors are written there.
"""

import json
import math
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from trapline.gold import softmax_topk  # noqa: E402
from trapline.gold.errors import DTypeError, RangeError  # noqa: E402
from trapline.gold.softmax_topk.triton import work_partition as plans  # noqa: E402

pytestmark = pytest.mark.needs_gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Comparisons made, and the largest errors seen in them.
SEEN = {"comparisons": 0, "float32 probabilities": 0.0, "lse": 0.0}


@pytest.fixture(scope="module", autouse=True)
def record():
    yield
    if file := os.environ.get("TRAPLINE_GPU_RECORD"):
        Path(file).write_text(json.dumps(SEEN) + "\n")


#: What rows may look like, from normal logits x (rows, V) and the column numbers c.
KINDS = {
    "normal": lambda x, c: x,
    "coarse": lambda x, c: (x * 2).round() / 2,
    "constant": lambda x, c: torch.full_like(x, -1.5),
    "rising": lambda x, c: (c / len(c)).expand_as(x),
    "falling": lambda x, c: (-c / len(c)).expand_as(x),
    "zeros": lambda x, c: torch.where(c % 2 == 0, -0.0, 0.0).expand_as(x),
    "a grammar allows five": lambda x, c: x.masked_fill(c % max(1, len(c) // 5) != 0, -torch.inf),
    "nothing": lambda x, c: torch.full_like(x, -torch.inf),
    "not numbers": lambda x, c: x.masked_fill(c % 1009 == 3 % len(c), torch.nan),
    "infinite": lambda x, c: x.masked_fill(c % 1013 == 5 % len(c), torch.inf),
    "one thread's": lambda x, c: torch.where(c % 512 == 7 % len(c), x + 20, x),
    "neighbours": lambda x, c: torch.where((c - len(c) // 2).abs() < 800, x + 20, x),
    "huge": lambda x, c: x * 1e4,
    "one far above": lambda x, c: torch.where(c == 77 % len(c), 3e4, x),
    "late": lambda x, c: torch.where(c > 2500, x + 600, x),
}


def made(kind, rows, V, dtype, seed=0):
    source = torch.Generator("cuda").manual_seed(seed + V)
    x = torch.randn(rows, V, generator=source, device="cuda")
    return KINDS[kind](x, torch.arange(V, device="cuda")).to(dtype)


def check(x, k, temperature=1.0):
    """Indices exactly; probabilities, their logarithms and lse to the precision of the dtype."""
    for log_probs in (False, True):
        got = softmax_topk(x, k, temperature=temperature, log_probs=log_probs, check=False)
        rows = max(1, (1 << 26) // x.shape[1])
        for start in range(0, x.shape[0], rows):
            here = slice(start, start + rows)
            each = temperature[here] if isinstance(temperature, torch.Tensor) else temperature
            agree(x[here], k, each, log_probs, *(part[here] for part in got))


def agree(x, k, temperature, log_probs, values, indices, lse):
    wide = x.double() + 0.0
    each = torch.as_tensor(temperature, dtype=torch.double, device="cuda").expand(len(x))[:, None]
    best, order = torch.sort(wide, dim=1, descending=True, stable=True)
    assert torch.equal(indices, order[:, :k])
    peak = best[:, :1]
    origin = peak.masked_fill(peak == -torch.inf, 0.0)
    log_total = ((wide - origin) / each).exp().sum(1, keepdim=True).log()
    want = (best[:, :k] - peak) / each - log_total
    want = want if log_probs else want.exp()
    step = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-10}[x.dtype]
    close = {"rtol": 2e-5 + step, "atol": 3e-5 if log_probs else 1e-7, "equal_nan": True}
    # A logarithm below the dtype's range is −inf in it. Others are not rounded here: what lies
    # halfway between two numbers of the dtype may become either.
    rounded = want.to(x.dtype).double()
    want = torch.where(rounded.isinf(), rounded, want)
    torch.testing.assert_close(values.double(), want, **close)
    log_sum = (peak / each + log_total)[:, 0]
    torch.testing.assert_close(lse.double(), log_sum, rtol=1e-6, atol=3e-5, equal_nan=True)
    note("lse", lse.double(), log_sum)
    if x.dtype == torch.float32 and not log_probs:
        note("float32 probabilities", values.double(), want)
    SEEN["comparisons"] += 1


def note(name, got, want):
    """Relative, where there is something to relate to."""
    error = ((got - want).abs() / want.abs().clamp_min(1e-6)).nan_to_num(0.0, 0.0, 0.0)
    SEEN[name] = max(SEEN[name], error.max().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "V", "k"),
    [
        *[(3, 97, 5), (5, 1000, 64), (4, 8192, 8), (3, 12000, 100), (2, 50257, 33)],
        *[(45, 50257, 33), (2, 70000, 300), (2, 40000, 70), (150, 5001, 20), (150, 9000, 200)],
        *[(600, 5001, 20), (600, 20002, 64), (3700, 16390, 64), (150, 9003, 700)],
        # Rows that begin and end with a multiple of 16 bytes.
        *[
            (600, 9000, 20),
            (150, 9000, 257),
            (600, 20000, 64),
            (3700, 16400, 64),
            (300, 70000, 256),
            (300, 70000, 999),
        ],
    ],
)
def test_rows_of_every_kind(rows, V, k, kind):
    for dtype in DTYPES:
        check(made(kind, rows, V, dtype), k)


def taking_turns(rows, V, sizes):
    """Every k, every dtype; which go together changes from V to V."""
    for place, k in enumerate(sizes):
        if k <= V:
            check(made("normal", rows, V, DTYPES[(place + V) % len(DTYPES)]), k)


@pytest.mark.parametrize("V", [1, 2, 3, 31, 97, 256, 257, 1000, 1024, 2047, 2048, 2049, 4095, 4096])
def test_every_short_block(V):
    taking_turns(7, V, sorted({1, 2, 8, 17, 33, 64, 65, 200, 513, min(V, 1024)}))


@pytest.mark.parametrize("V", [8190, 8191, 8192, 16382, 16383, 16384])
def test_every_large_block_in_registers(V):
    taking_turns(5, V, (1, 8, 32, 64, 128, 256, 1024))


@pytest.mark.parametrize("V", [2049, 2055, 4096, 10000, 12001, 16383, 16384])
def test_every_plan_of_many_rows(V):
    taking_turns(200, V, (2, 8, 17, 64, 65, 128, 200, 256, 500, 1000, 1024))


@pytest.mark.parametrize("V", [2049, 2055, 4096, 10000, 16384, 16385, 32000, 32767, 32768])
def test_every_plan_of_thousands_of_rows(V):
    taking_turns(600, V, (2, 3, 8, 17, 33, 64))


@pytest.mark.parametrize("V", [16385, 20001, 32000, 32768])
def test_every_plan_of_one_kernel_that_reads_and_selects(V):
    assert plans.long_plan(3700, V, 64, V, 8, 132).lag
    taking_turns(3700, V, (1, 2, 17, 64))


@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize("k", [1, 2, 7, 16, 32, 50, 64, 65, 128, 200, 256, 500, 1000, 1024])
def test_every_long_plan(k, rows):
    """Few logits in all, and many."""
    for V in (16385, 50257, 128256):
        taking_turns(rows, V + k % 3, [k])


@pytest.mark.parametrize("k", [1, 64, 256, 1024])
def test_more_than_a_million_logits(k):
    for V in (500000, 1000000, 1000003, 3000001, 20000003):
        taking_turns(2, V, [k])


@pytest.mark.parametrize("rows", [1, 2, 8, 64, 131, 133, 300, 1000, 8192])
@pytest.mark.parametrize("V", [1000, 20000])
def test_every_batch(rows, V):
    check(made("normal", rows, V, torch.float32), 20)


@pytest.mark.parametrize("V", [1, 97, 1000])
def test_k_equal_to_the_row_length(V):
    for dtype in DTYPES:
        check(made("coarse", 4, V, dtype), V)


def test_a_batch_of_every_size_has_the_same_rows():
    """Splits depend on the batch: their sums differ by roundings, the ranking does not."""
    x = made("coarse", 300, 40000, torch.bfloat16)
    together = softmax_topk(x, 30)
    for rows in (1, 5, 40, 140):
        alone = softmax_topk(x[:rows], 30)
        assert torch.equal(alone.indices, together.indices[:rows])
        torch.testing.assert_close(alone.lse, together.lse[:rows], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("V", [1000, 40001])
def test_a_temperature_for_every_row(V):
    each = torch.linspace(0.3, 3.0, 9, device="cuda")
    check(made("normal", 9, V, torch.float32), 12, each)
    check(made("normal", 9, V, torch.float32), 12, 1e-30)
    check(made("normal", 9, V, torch.bfloat16), 12, 0.7)


@pytest.mark.parametrize("V", [999, 33333])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(V, dtype):
    wide = made("normal", 6, 2 * V + 5, dtype)
    check(wide[::2, 3 : V + 3], 40)
    check(wide[:, :V][:, ::1][1:4], 3)
    check(wide.T[:V].T, 9)
    check(wide[:1].expand(200, -1)[:, 1 : min(V, 9000)], 30)
    check(made("normal", V, 6, dtype).T, 9)  # columns far apart


def test_unaligned_row_at_the_end_of_memory():
    """The last row ends with its storage, and no load of 16 bytes may go beyond."""
    check(made("normal", 16, 131072, torch.float16)[:, 1:], 20)


def test_no_rows():
    got = softmax_topk(torch.empty(0, 50, device="cuda"), 3)
    assert got.values.shape == got.indices.shape == (0, 3)
    assert got.lse.shape == (0,)


@pytest.mark.parametrize("V", [1 << 18, 4097])
def test_more_logits_than_32_bits_count(V):
    rows = (1 << 31) // V + 2
    x = torch.zeros(rows, V, dtype=torch.bfloat16, device="cuda")
    x[:, 11] = 3.0
    x[-1, V - 2] = 5.0
    got = softmax_topk(x, 3)
    assert got.indices[-1].tolist() == [V - 2, 11, 0]
    assert (got.indices[:-1] == torch.tensor([11, 0, 1], device="cuda")).all()
    assert math.isclose(got.lse[0].item(), math.log(V - 1 + math.exp(3.0)), rel_tol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "V", "k"),
    [(40, 9000, 30), (3, 200000, 64), (30, 60000, 700), (200, 9000, 30), (200, 9000, 300)],
)
def test_twenty_runs_are_the_same_bits(rows, V, k, dtype):
    x = made("coarse", rows, V, dtype)
    first = softmax_topk(x, k, temperature=0.9)
    for _ in range(20):
        again = softmax_topk(x, k, temperature=0.9)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("rows", "V", "k"),
    [(40, 9000, 30), (2, 90000, 64), (5, 700, 1), (200, 5000, 99), (3700, 17000, 64)],
)
def test_captured_in_a_graph(rows, V, k):
    """Nothing waits for the device, and a replay sees new logits."""
    x = made("normal", rows, V, torch.float32)
    softmax_topk(x, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = softmax_topk(x, k, temperature=0.8)
    for seed in range(3):
        x.copy_(made("coarse", rows, V, torch.float32, seed))
        graph.replay()
        agree(x, k, 0.8, False, *got)


@pytest.mark.parametrize(("rows", "V"), [(4, 150000), (3700, 17000)])
def test_streams_do_not_disturb_each_other(rows, V):
    xs = [made("normal", rows, V, torch.float32, seed) for seed in range(6)]
    want = [softmax_topk(x, 50) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(softmax_topk(x, 50, check=False))
        torch.cuda.synchronize()
        for one, other in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_unrankable_rows_are_rejected():
    x = torch.zeros(2, 5000, device="cuda")
    for k in (0, 5001):
        with pytest.raises(RangeError, match="k"):
            softmax_topk(x, k)
    with pytest.raises(RangeError, match="1024"):
        softmax_topk(x, 1025)
    with pytest.raises(DTypeError, match="float64"):
        softmax_topk(x.double(), 3)
    x[1, 7] = torch.nan
    with pytest.raises(RangeError, match="NaN"):
        softmax_topk(x, 3, check=True)


@pytest.mark.parametrize("V", [600, 30000])
def test_operator_passes_opcheck(V):
    from trapline.gold.softmax_topk.triton.topk import topk_operator

    x = made("normal", 3, V, torch.float32)
    for each in (None, torch.ones(3, device="cuda")):
        torch.library.opcheck(
            topk_operator.overload,
            (x, 4, 0.5, each, True),
            test_utils=("test_schema", "test_faketensor"),
        )
