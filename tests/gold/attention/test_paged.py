"""Attention over pages: the torch path against the oracle, appending, and what is refused."""

import numpy as np
import pytest

from trapline.gold import paged_append, paged_attention
from trapline.gold.attention import oracle
from trapline.gold.errors import DTypeError, RangeError, ShapeError

torch = pytest.importorskip("torch")

CODES = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}


def problem(lengths, new, *, H=4, G=2, D=8, P=4, seed=0):
    """Sequences on shuffled pages; unused memory is NaN."""
    rng = np.random.default_rng(seed)
    width = max(1, max(-(-length // P) for length in lengths))
    pages = sum(-(-length // P) for length in lengths) + 1
    free = list(rng.permutation(pages))
    table = np.full((len(lengths), width), -7, np.int32)
    k, v = np.full((2, pages, G, P, D), np.nan)
    for b, length in enumerate(lengths):
        for start in range(0, length, P):
            page = free.pop()
            table[b, start // P] = page
            filled = min(P, length - start)
            k[page, :, :filled], v[page, :, :filled] = rng.standard_normal((2, G, filled, D))
    starts = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    q = rng.standard_normal((starts[-1], H, D))
    return q, k, v, table, np.array(lengths, np.int32), starts


def tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


def test_oracle_agrees_with_dense_attention():
    q, k, v, table, lengths, _ = problem([11], [3])
    rows = [np.concatenate([pages[p] for p in table[0]], axis=1)[None, :, :11] for pages in (k, v)]
    want, _ = oracle.attention(q.swapaxes(0, 1)[None], *rows, causal=True, window=5)
    got = paged_attention(q, k, v, table, lengths, max_q=3, window=5, check=True)
    assert np.allclose(got, want[0].swapaxes(0, 1), atol=1e-14)


@pytest.mark.parametrize(
    "rules", [{}, {"window": 3}, {"softcap": 1.5, "scale": 0.3}], ids=["plain", "window", "softcap"]
)
@pytest.mark.parametrize(
    ("lengths", "new"), [([5, 0, 9], [1, 1, 1]), ([7, 4, 12], [3, 0, 5]), ([1], [1])]
)
def test_tensors_agree_with_the_oracle(lengths, new, rules):
    q, k, v, table, seq_lens, starts = problem(lengths, new)
    given = q, k, v, table, seq_lens
    options = {"max_q": max(new), **rules}
    if len(set(new)) > 1:
        want = paged_attention(*given, cu_q=starts, **options)
        got = paged_attention(*tensors(*given), cu_q=torch.from_numpy(starts), **options)
    else:
        want, got = paged_attention(*given, **options), paged_attention(*tensors(*given), **options)
    assert np.allclose(got, want, atol=1e-12)
    for b, length in enumerate(lengths):
        if not length:
            assert not got[starts[b] : starts[b + 1]].any()


def test_tree_mask():
    q, k, v, table, lengths, _ = problem([9, 6], [3, 3])
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]] * 2, dtype=bool)
    given = q, k, v, table, lengths
    want = paged_attention(*given, max_q=3, tree_mask=mask)
    got = paged_attention(*tensors(*given), max_q=3, tree_mask=torch.from_numpy(mask))
    assert np.allclose(got, want, atol=1e-12)
    chain = np.tril(np.ones((3, 3), bool))
    plain = paged_attention(*given, max_q=3)
    assert np.allclose(paged_attention(*given, max_q=3, tree_mask=np.tile(chain, (2, 1))), plain)
    assert not np.allclose(want, plain)


@pytest.mark.parametrize("kind", CODES)
def test_appended_codes_are_attended_within_their_error(kind):
    G, D, P, tokens = 2, 16, 4, 10
    k, v = torch.randn(2, tokens, G, D, generator=torch.manual_seed(0))
    columns = D // 2 if kind == "int4" else D
    pages = [torch.zeros(4, G, P, columns, dtype=torch.uint8).view(CODES[kind]) for _ in range(2)]
    scales = [torch.zeros(4, G, P, dtype=torch.float16) for _ in range(2)]
    slots = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15, 0, -1])
    paged_append(k, v, *pages, slots, k_scale=scales[0], v_scale=scales[1])
    table, lengths = torch.tensor([[1, 3, 0]], dtype=torch.int32), torch.tensor([9]).int()
    q = torch.randn(1, 4, D, generator=torch.manual_seed(1))
    got = paged_attention(q, *pages, table, lengths, k_scale=scales[0], v_scale=scales[1])
    rows = [x[:9].transpose(0, 1)[None].double().numpy() for x in (k, v)]
    want, _ = oracle.attention(q.transpose(0, 1)[None].double().numpy(), *rows, causal=True)
    allowed = {"int8": 0.02, "int4": 0.3, "fp8": 0.08}[kind]
    assert np.abs(got.numpy() - want[0].swapaxes(0, 1)).max() < allowed
    if kind != "fp8":
        numpy = [x.numpy() for x in (q.double(), *pages, table, lengths)]
        named = {"k_scale": scales[0].numpy(), "v_scale": scales[1].numpy()}
        assert np.allclose(got, paged_attention(*numpy, **named), atol=1e-5)


def test_plain_rows_are_appended_or_skipped():
    k, v = torch.randn(2, 3, 2, 4)
    k_pages, v_pages = torch.zeros(2, 2, 2, 2, 4)
    paged_append(k, v, k_pages, v_pages, torch.tensor([3, -1, 0]))
    assert torch.equal(k_pages[1, :, 1], k[0])
    assert torch.equal(v_pages[0, :, 0], v[2])
    assert not k_pages[0, :, 1].any()


def test_rope_is_applied_to_appended_keys():
    k, v = torch.randn(2, 3, 2, 6, generator=torch.manual_seed(0))
    angles = torch.rand(3, 3, generator=torch.manual_seed(1))
    pages = torch.zeros(2, 1, 2, 4, 6)
    paged_append(k, v, *pages, torch.arange(3), cosine=angles.cos(), sine=angles.sin())
    pairs = torch.complex(*k.chunk(2, dim=-1)) * torch.polar(torch.ones(()), angles)[:, None]
    turned = torch.cat((pairs.real, pairs.imag), dim=-1)
    assert torch.allclose(pages[0, 0, :, :3], turned.transpose(0, 1))
    assert torch.equal(pages[1, 0, :, :3], v.transpose(0, 1))


def test_shared_prefix_does_not_change_the_result():
    q, k, v, table, lengths, _ = problem([11, 9, 6], [1, 1, 1])
    table[1, :2] = table[0, :2]
    hint = {"prefix_rows": 3, "prefix_pages": np.array([1], np.int32)}
    with pytest.raises(RangeError, match="sequence 2 does not begin"):
        paged_attention(q, k, v, table, lengths, **hint, check=True)
    table[2, 0] = table[0, 0]
    want = paged_attention(q, k, v, table, lengths)
    assert np.array_equal(paged_attention(q, k, v, table, lengths, **hint, check=True), want)
    given = tensors(q, k, v, table, lengths)
    got = paged_attention(*given, prefix_rows=3, prefix_pages=torch.tensor([1]).int())
    assert np.allclose(got, want, atol=1e-12)


def test_out_is_written_in_place():
    given = tensors(*problem([5], [1])[:5])
    out = torch.empty_like(given[0])
    assert paged_attention(*given, out=out) is out
    assert torch.equal(out, paged_attention(*given))


def test_operators_pass_opcheck():
    q, k, v, table, lengths, starts = tensors(*problem([5, 7], [1, 2]))
    rules = (0, 0.0, 0.3, 0, None, torch.empty_like(q))
    given = (q, k, v, table, lengths, starts, 2, None, None, None, *rules)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.trapline_paged.attention, given, test_utils=tests)
    rows, pages = torch.randn(2, 2, 4), torch.zeros(3, 2, 4, 4)
    given = (rows, rows, pages, pages.clone(), torch.tensor([0, 5]), None, None, None, None)
    torch.library.opcheck(torch.ops.trapline_paged.append, given, test_utils=tests)


def broken(**changes):
    q, k, v, table, lengths, _ = problem([5, 7], [1, 1])
    given = {"q": q, "k_pages": k, "v_pages": v, "block_table": table, "seq_lens": lengths}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": np.zeros((2, 3, 8))}, ShapeError, "must be a multiple"),
        ({"q": np.zeros((2, 4, 6))}, ShapeError, "rows of 8"),
        ({"q": np.zeros((3, 4, 8))}, ShapeError, "got 3"),
        ({"seq_lens": np.array([5, 7])}, DTypeError, "int32"),
        ({"k_pages": np.zeros((5, 2, 4, 8), np.int8)}, DTypeError, "one dtype"),
        ({"k_scale": np.zeros((5, 2, 4), np.float16)}, DTypeError, "do not take k_scale"),
        ({"max_q": 0}, RangeError, "max_q"),
        ({"window": 0}, RangeError, "window"),
        ({"softcap": -1.0}, RangeError, "softcap"),
        ({"seq_lens": np.array([5, 90], np.int32)}, ShapeError, "90"),
        ({"seq_lens": np.array([5, -1], np.int32), "check": True}, ShapeError, "got -1"),
        ({"block_table": np.full((2, 2), 99, np.int32)}, RangeError, "99"),
        ({"out": np.zeros((1, 4, 8))}, ShapeError, "like q"),
        ({"out": torch.zeros(2, 4, 8)}, DTypeError, "one kind"),
        ({"prefix_rows": 2}, RangeError, "both"),
        ({"prefix_rows": -1}, RangeError, "prefix_rows"),
        ({"prefix_rows": 2, "prefix_pages": np.zeros(2, np.int32)}, ShapeError, "group of 2"),
        ({"prefix_rows": 1, "prefix_pages": np.zeros(2)}, DTypeError, "int32"),
    ],
)
def test_bad_input_is_rejected(changes, error, words):
    with pytest.raises(error, match=words):
        paged_attention(**broken(**changes))


def test_tensors_on_two_devices_are_rejected():
    given = tensors(*problem([5, 7], [1, 1])[:5])
    with pytest.raises(DTypeError, match="v_pages is on meta"):
        paged_attention(*given[:2], given[2].to("meta"), *given[3:])
    with pytest.raises(DTypeError, match="out is on meta"):
        paged_attention(*given, out=given[0].to("meta"))
    rows, pages = torch.randn(2, 2, 4), torch.zeros(3, 2, 4, 4)
    with pytest.raises(DTypeError, match="slots is on meta"):
        paged_append(rows, rows, pages, pages.clone(), torch.tensor([0, 5], device="meta"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"v": torch.zeros(2, 2, 4).half()}, DTypeError, "one dtype"),
        ({"k": torch.zeros(2, 2, 4).int(), "v": torch.zeros(2, 2, 4).int()}, DTypeError, "int32"),
        ({"k": torch.zeros(2, 2, 6), "v": torch.zeros(2, 2, 6)}, ShapeError, "rows of 4"),
        ({"slots": torch.tensor([0, 5]).int()}, DTypeError, "int64"),
        ({"slots": torch.tensor([0, 5, 6])}, ShapeError, "slots"),
        ({"slots": torch.tensor([0, 12])}, RangeError, "slot 12"),
        ({"slots": torch.tensor([0, -2]), "check": True}, RangeError, "slot -2"),
    ],
)
@pytest.mark.parametrize("codes", [False, True])
def test_bad_rows_are_not_appended(changes, error, words, codes):
    pages = torch.zeros(2, 3, 2, 4, 4, dtype=torch.int8 if codes else torch.float32)
    scales = torch.zeros(2, 3, 2, 4, dtype=torch.float16)
    given = {"k": torch.ones(2, 2, 4), "v": torch.ones(2, 2, 4), "slots": torch.tensor([0, 5])}
    more = {"k_scale": scales[0], "v_scale": scales[1]} if codes else {}
    with pytest.raises(error, match=words):
        paged_append(k_pages=pages[0], v_pages=pages[1], **{**given, **more, **changes})
    assert not pages.any()


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"cosine": torch.zeros(2, 2)}, "one of them"),
        ({"cosine": torch.zeros(2, 3), "sine": torch.zeros(2, 3)}, r"must be \(2, 2\)"),
    ],
)
def test_bad_angles_are_rejected(turn, words):
    rows, pages = torch.randn(2, 2, 4), torch.zeros(3, 2, 4, 4)
    with pytest.raises(ShapeError, match=words):
        paged_append(rows, rows, pages, pages.clone(), torch.tensor([0, 5]), **turn)
