"""The paged kernels on a GPU: every kind of page, width, page size and feature, against float64."""

import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold import paged_append, paged_attention  # noqa: E402
from trapline.gold.attention.paged import PagedProblem  # noqa: E402
from trapline.gold.attention.paged.hopper import decode  # noqa: E402
from trapline.gold.call_plans import forget_plans  # noqa: E402

pytestmark = pytest.mark.needs_gpu
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
KINDS = ("plain", *CODES)
#: Relative to float64 on the stored values, in the 2-norm: what rounding weights and answer costs.
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1.2e-3, torch.float32: 3e-6}
LENGTHS = [1000, 0, 77, 640, 1, 2500]


@pytest.fixture(autouse=True)
def _few_rows_too(monkeypatch):
    """Hopper's decoding leaves few rows to the other kernel; here it takes all that it can.

    A call that was seen before would repeat the kernel that was chosen then.
    """
    monkeypatch.setattr(decode, "MOST_PARTS", 1000)
    forget_plans()


def cache(kind, dtype, G, D, P, lengths, seed=0, tight=False):
    """Shuffled pages filled by `paged_append`; unwritten memory is NaN.

    A `tight` cache is (pages, P, G, D) in memory, as a decoder keeps it.
    """
    numbers = torch.Generator("cuda").manual_seed(seed)
    width = max(1, max(-(-length // P) for length in lengths))
    count = len(lengths) * width
    table = torch.randperm(count, generator=numbers, device="cuda").int().view(-1, width)
    slots = torch.cat([
        table[b, torch.arange(n, device="cuda") // P].long() * P
        + torch.arange(n, device="cuda") % P
        for b, n in enumerate(lengths)
    ])  # fmt: skip
    columns = D // 2 if kind == "int4" else D
    shape = (count, P, G, columns) if tight else (count, G, P, columns)
    if kind == "plain":
        pages = [torch.full(shape, torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
        scales = [None, None]
    else:
        raw = [torch.full(shape, 0x7F, device="cuda", dtype=torch.uint8) for _ in range(2)]
        pages = [x.view(CODES[kind]) for x in raw]
        scales = [torch.full((count, G, P), torch.nan, device="cuda").half() for _ in range(2)]
    if tight:
        pages = [x.transpose(1, 2) for x in pages]
    k, v = torch.randn(2, len(slots), G, D, generator=numbers, device="cuda").to(dtype)
    paged_append(k, v, *pages, slots, k_scale=scales[0], v_scale=scales[1])
    named = {"k_scale": scales[0], "v_scale": scales[1]}
    # Beyond its length a row's table is garbage too.
    used = torch.tensor([-(-n // P) for n in lengths], device="cuda")
    table[torch.arange(width, device="cuda") >= used[:, None]] = -7
    return pages, table, torch.tensor(lengths, device="cuda").int(), named


def exact(q, pages, table, lengths, named, **rules):
    """In float64 by the torch path, which the oracle checks."""
    if named["k_scale"] is None:
        pages = [x.double() for x in pages]
    rules = {k: v for k, v in rules.items() if not k.startswith("prefix")}
    return paged_attention(q.double(), *pages, table, lengths, **named, **rules, impl="torch")


def queries(count, H, D, dtype, seed=1):
    numbers = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(count, H, D, generator=numbers, device="cuda").to(dtype)


def close(q, stored, **rules):
    """Right, and the same bits again, into an `out` that was full of something else."""
    pages, table, lengths, named = stored
    out = torch.full_like(q, torch.nan)
    got = paged_attention(q, *pages, table, lengths, **named, **rules, out=out)
    want = exact(q, pages, table, lengths, named, **rules)
    assert torch.isfinite(got).all()
    distance = float((got.double() - want).norm() / want.norm())
    assert distance <= LIMITS[q.dtype], distance
    for _ in range(3):
        again = paged_attention(q, *pages, table, lengths, **named, **rules)
        assert torch.equal(got, again)
    return got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("D", "P"), [(64, 16), (96, 64), (128, 16), (128, 128), (256, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding(kind, D, P, dtype):
    stored = cache(kind, dtype, 2, D, P, LENGTHS, tight=P == 16)
    got = close(queries(len(LENGTHS), 8, D, dtype), stored)
    assert not got[1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_few_sequences_use_the_plain_kernel(kind, monkeypatch):
    monkeypatch.undo()
    forget_plans()
    stored = cache(kind, torch.bfloat16, 2, 128, 16, LENGTHS)
    q = queries(6, 8, 128, torch.bfloat16)
    options = None, 1, None, None, None, 0, 0.0, 0.1, 0, None
    problem = PagedProblem(q, *stored[0], *stored[1:3], *options, q)
    assert "6 sequences" in decode.supports(problem, KINDS.index(kind))
    close(q, stored)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision(kind):
    close(queries(6, 4, 64, torch.float32), cache(kind, torch.float32, 2, 64, 16, LENGTHS))


@pytest.mark.parametrize("H", [1, 3, 7, 9, 16, 32])
def test_groups_of_any_size(H):
    close(queries(6, H, 128, torch.bfloat16), cache("plain", torch.bfloat16, 1, 128, 16, LENGTHS))


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("H", [1, 3, 8, 9, 16])
def test_groups_of_any_size_over_codes(H, kind):
    """More than eight heads go to the other kernel."""
    close(queries(6, H, 128, torch.bfloat16), cache(kind, torch.bfloat16, 1, 128, 16, LENGTHS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("D", "P"), [(64, 128), (128, 32), (128, 48), (128, 24)])
def test_pages_of_any_size(kind, D, P):
    """Whole tiles of pages, tiles that end inside of pages, and pages of no sixteen positions."""
    close(queries(6, 8, D, torch.bfloat16), cache(kind, torch.bfloat16, 2, D, P, LENGTHS))


@pytest.mark.parametrize("kind", CODES)
def test_scales_and_queries_far_apart(kind):
    """Scales from the smallest to a hundred, one of 0; heads that differ by a million; one of 0."""
    pages, table, lengths, named = cache(kind, torch.bfloat16, 2, 128, 16, LENGTHS)
    numbers = torch.Generator("cuda").manual_seed(3)
    for scales in named.values():
        powers = 26.0 * torch.rand(scales.shape, generator=numbers, device="cuda") - 24.0
        scales.copy_(torch.where(scales.isnan(), scales, powers.exp2()))
        scales[table[0, 0].item(), :, 5] = 0.0
    q = queries(6, 8, 128, torch.bfloat16)
    q[:, 0], q[:, 1], q[:, 2] = 1e-4 * q[:, 0], 100.0 * q[:, 1], 0.0
    close(q, (pages, table, lengths, named))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_head(kind):
    pages, table, lengths, named = cache(kind, torch.bfloat16, 2, 128, 16, LENGTHS)
    q = queries(6, 8, 128, torch.bfloat16)
    want = paged_attention(q, *pages, table, lengths, **named)
    q[0, 3, 77] = torch.nan
    got = paged_attention(q, *pages, table, lengths, **named)
    assert got[0, 3].isnan().all()
    got[0, 3] = want[0, 3]
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_one_key_far_above_all_others(kind):
    """Half of the weight on one key, the other half on eight thousand whose values agree."""
    count = 8000
    pages, table, lengths, named = cache(kind, torch.bfloat16, 1, 128, 16, [count])
    q = torch.zeros(1, 4, 128, device="cuda").bfloat16()
    k, v = torch.zeros(2, count, 1, 128, device="cuda").bfloat16()
    q[:, :, 0], k[:, :, 1], k[count // 3, :, 0] = 1.0, 1.0, 9.0
    v += 1.0
    v[count // 3] = 0.0
    place = torch.arange(count, device="cuda")
    slots = table[0, place // 16].long() * 16 + place % 16
    paged_append(k, v, *pages, slots, **named)
    close(q, (pages, table, lengths, named), scale=1.0)


@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
@pytest.mark.parametrize("rules", [{"window": 100}, {"softcap": 5.0, "scale": 0.2}, {"window": 1}])
def test_window_and_softcap(kind, rules):
    stored = cache(kind, torch.bfloat16, 2, 128, 16, LENGTHS)
    close(queries(6, 8, 128, torch.bfloat16), stored, **rules)


@pytest.mark.parametrize("kind", ["plain", "fp8", "int4"])
@pytest.mark.parametrize("new", [[1, 0, 7, 40, 1, 300], [5, 5, 5, 5, 1, 5]])
def test_several_queries(kind, new):
    lengths = [1000, 20, 77, 640, 1, 2500]
    ends = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    stored = cache(kind, torch.bfloat16, 2, 128, 16, lengths)
    q = queries(sum(new), 8, 128, torch.bfloat16)
    close(q, stored, cu_q=ends, max_q=max(new))


#: Axes of (layers, pages, heads, positions, keys beside values) in memory: the layouts of vLLM.
ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@pytest.mark.parametrize("order", ORDERS)
def test_keys_beside_values_in_any_order_of_memory(order):
    """Pages that are views of one layer of vLLM's cache; the other layer stays as it is."""
    new, lengths = [5, 1, 7, 40, 1, 300], [1000, 20, 77, 640, 1, 2500]
    pages, table, ends, named = cache("plain", torch.bfloat16, 2, 128, 16, lengths)
    axes = ["LBHNC".index(letter) for letter in order]
    sizes = [(2, len(pages[0]), 2, 16, 256)[axis] for axis in axes]
    memory = torch.full(sizes, torch.nan, device="cuda", dtype=torch.bfloat16)
    layer = memory.permute([order.index(letter) for letter in "LBHNC"])[1]
    views = layer[..., :128], layer[..., 128:]
    for view, page in zip(views, pages, strict=True):
        view.copy_(page)
    slots = table[0, :20].long() * 16 + 3
    rows = queries(20, 12, 128, torch.bfloat16, seed=2).split([8, 2, 2], 1)
    for keys, values in (pages, views):
        paged_append(*rows[1:], keys, values, slots)
    for view, page in zip(views, pages, strict=True):
        assert torch.equal(view.nan_to_num(), page.nan_to_num())
    assert memory.select(order.index("L"), 0).isnan().all()
    starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    for count, rules in ((6, {}), (sum(new), {"cu_q": starts, "max_q": max(new)})):
        close(queries(count, 8, 128, torch.bfloat16), (views, table, ends, named), **rules)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 8, 60, 65, 130])
def test_draft_trees(kind, nodes):
    """Words of a tree that begin and end within tiles; mask rows that are not whole words."""
    stored = cache(kind, torch.bfloat16, 2, 128, 16, [1000, nodes, nodes + 17])
    numbers = torch.Generator("cuda").manual_seed(5)
    tree = torch.rand(3 * nodes, nodes, generator=numbers, device="cuda") < 0.5
    close(queries(3 * nodes, 8, 128, torch.bfloat16), stored, max_q=nodes, tree_mask=tree)


def test_trees_of_different_sizes():
    new = [40, 7, 64, 0]
    stored = cache("plain", torch.float16, 2, 64, 48, [1000, 77, 64, 0])
    ends = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    # A mask whose rows are wider than the largest tree.
    wide = torch.rand(sum(new), 72, generator=torch.Generator("cuda").manual_seed(5), device="cuda")
    asked = {"max_q": 64, "cu_q": ends, "tree_mask": (wide < 0.5)[:, :64]}
    close(queries(sum(new), 4, 64, torch.float16), stored, **asked)


def test_a_tree_behind_a_shared_prefix():
    pages, table, lengths, named = cache("plain", torch.bfloat16, 2, 128, 16, [500, 90, 104, 120])
    table[1:, :4] = table[0, :4]
    hint = {"prefix_rows": 4, "prefix_pages": torch.tensor([4], device="cuda").int()}
    tree = torch.rand(4 * 24, 24, generator=torch.Generator("cuda").manual_seed(5), device="cuda")
    asked = {"max_q": 24, "tree_mask": tree < 0.5, **hint}
    close(queries(96, 8, 128, torch.bfloat16), (pages, table, lengths, named), **asked)


@pytest.mark.parametrize(("kind", "new"), list(itertools.product(KINDS, (1, 3))))
def test_a_shared_prefix_is_read_once(kind, new):
    """Two groups of three: one shares five pages, the other none."""
    pages, table, lengths, named = cache(kind, torch.bfloat16, 2, 128, 16, [500, 90, 84, 70, 9, 33])
    table[1:3, :5] = table[0, :5]
    hint = {"prefix_rows": 3, "prefix_pages": torch.tensor([5, 0], device="cuda").int()}
    q = queries(6 * new, 8, 128, torch.bfloat16)
    close(q, (pages, table, lengths, named), max_q=new, **hint)


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_among_short_ones(kind):
    lengths = [30000, *[100] * 40, 5000]
    stored = cache(kind, torch.bfloat16, 2, 128, 16, lengths)
    close(queries(len(lengths), 8, 128, torch.bfloat16), stored)


@pytest.mark.parametrize(("kind", "count"), [("plain", 700), ("plain", 1100), ("int4", 700)])
def test_many_rows(kind, count):
    lengths = [40 + n % 17 for n in range(count)]
    stored = cache(kind, torch.bfloat16, 2, 64, 16, lengths)
    close(queries(count, 8, 64, torch.bfloat16), stored)


@pytest.mark.parametrize("first_in_graph", [True, False])
def test_cuda_graph_reads_its_inputs_at_replay(first_in_graph, monkeypatch):
    from trapline.gold import completion_counters

    pages, table, lengths, named = cache("int8", torch.bfloat16, 2, 128, 16, LENGTHS)
    q, out = queries(6, 8, 128, torch.bfloat16), torch.empty(6, 8, 128, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            paged_attention(q, *pages, table, lengths, **named, out=out)
    torch.cuda.current_stream().wait_stream(side)
    if first_in_graph:
        monkeypatch.setattr(completion_counters, "_made", {})
        forget_plans()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(q, *pages, table, lengths, **named, out=out)
        paged_attention(q, *pages, table, lengths, **named, out=out)
    for seed in range(3):
        q.copy_(queries(6, 8, 128, torch.bfloat16, seed))
        lengths.copy_(torch.tensor(LENGTHS, device="cuda").int() - int(seed > 0))
        lengths.clamp_(min=0)
        graph.replay()
        want = exact(q, pages, table, lengths, named)
        assert float((out.double() - want).norm() / want.norm()) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("kind", KINDS)
def test_changes_by_the_previous_kernel_are_seen(kind):
    """Launches are let in early and guess; here every launch before another proves it wrong."""
    pages, table, lengths, named = cache(kind, torch.bfloat16, 2, 128, 16, [3000] * 8)
    q = queries(8, 8, 128, torch.bfloat16)
    numbers = torch.Generator("cuda").manual_seed(5)
    others = torch.randint(0, 3001, (40, 8), generator=numbers, device="cuda").int()
    orders = torch.argsort(torch.rand(40, 8, generator=numbers, device="cuda"), dim=1)
    found = []
    now, rows = lengths.clone(), table.clone()
    for other, order in zip(others, orders, strict=True):
        now.copy_(other)
        torch.index_select(table, 0, order, out=rows)
        found.append(paged_attention(q, *pages, rows, now, **named))
        found.append(paged_attention(q, *pages, rows, now, **named))
    for number, (other, order) in enumerate(zip(others, orders, strict=True)):
        torch.cuda.synchronize()
        want = paged_attention(q, *pages, table[order], other.clone(), **named)
        torch.cuda.synchronize()
        assert torch.equal(found[2 * number], want)
        assert torch.equal(found[2 * number + 1], want)
    close(q, (pages, table[orders[0]], others[0], named))


def test_streams_do_not_disturb_each_other():
    stored = cache("plain", torch.bfloat16, 2, 128, 16, [20000, 3000])
    pages, table, lengths, _ = stored
    q = queries(2, 8, 128, torch.bfloat16)
    want = paged_attention(q, *pages, table, lengths)
    streams, found = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for number in range(200):
        with torch.cuda.stream(streams[number % 4]):
            found.append(paged_attention(q, *pages, table, lengths))
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in found)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_appending_agrees_with_torch(kind, dtype, turned):
    G, D, P, tokens = 3, 96, 16, 50
    numbers = torch.Generator("cuda").manual_seed(0)
    k, v = torch.randn(2, tokens, G, D, generator=numbers, device="cuda").to(dtype)
    k[3], v[4] = 0.0, 0.0
    slots = torch.randperm(5 * P, generator=numbers, device="cuda")[:tokens]
    slots[7] = -1
    angles = 6.0 * torch.rand(tokens, D // 2, generator=numbers, device="cuda")
    turn = {"cosine": angles.cos(), "sine": angles.sin()} if turned else {}
    columns = D // 2 if kind == "int4" else D
    made = []
    # On a CPU torch divides; on a GPU it multiplies by the reciprocal of a Python number.
    for device in ("cuda", "cpu"):
        raw = torch.zeros((2, 5, G, P, columns), device=device, dtype=torch.uint8)
        pages = raw.view(CODES[kind]) if kind in CODES else raw.to(dtype)
        scales = torch.zeros(2, 5, G, P, device=device).half() if kind in CODES else (None, None)
        there = {name: x.to(device) for name, x in turn.items()}
        rows = k.to(device), v.to(device), *pages, slots.to(device)
        paged_append(*rows, k_scale=scales[0], v_scale=scales[1], **there)
        made.append((pages, scales))
    for ours, theirs in zip(*made, strict=True):
        if ours[0] is not None:
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))


def test_operators_pass_opcheck():
    pages, table, lengths, _ = cache("plain", torch.bfloat16, 2, 64, 16, [50, 70])
    q = queries(2, 4, 64, torch.bfloat16)
    tests = ("test_schema", "test_faketensor")
    operators = torch.ops.trapline_paged_kernels
    given = (q, *pages, table, lengths, None, 1, None, None, None, 0, 0.0, 0.1, 0, None)
    torch.library.opcheck(operators.attention, (*given, torch.empty_like(q)), test_utils=tests)
    rows = queries(3, 2, 64, torch.bfloat16)
    slots = torch.tensor([0, 5, -1], device="cuda")
    given = (rows, rows, *(x.clone() for x in pages), slots, None, None, None, None)
    torch.library.opcheck(operators.append, given, test_utils=tests)


def test_torch_compile():
    pages, table, lengths, _ = cache("plain", torch.bfloat16, 2, 64, 16, [50, 70])
    q = queries(2, 4, 64, torch.bfloat16)

    def step(q):
        return 2.0 * paged_attention(q + 1.0, *pages, table, lengths)

    assert torch.equal(torch.compile(step, fullgraph=False)(q), step(q))
