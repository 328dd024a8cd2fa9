"""A step's operations in C, against float64 and against torch where torch takes over."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from trapline.gold.attention.paged.api import paged_attention
from trapline.gold.decoder import step_ops
from trapline.gold.decoder.config import AttentionRules
from trapline.gold.decoder.cpu import compiled_ops, linear_few_rows
from trapline.gold.decoder.pool import StoredLayer
from trapline.gold.decoder.rope import Rope

needs_compiler = pytest.mark.skipif(compiled_ops.unavailable() is not None, reason="no C compiler")


@pytest.fixture
def in_threads():
    """Calls a function with this number of threads."""
    before = torch.get_num_threads()

    def call(threads, work, *given):
        torch.set_num_threads(threads)
        return work(*given)

    yield call
    torch.set_num_threads(before)


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine without a C compiler."""
    monkeypatch.setenv("PATH", "")
    for module in (compiled_ops, linear_few_rows):
        module._library.cache_clear()
        assert "no C compiler" in module.unavailable()
    yield
    for module in (compiled_ops, linear_few_rows):
        module._library.cache_clear()


def layer(rows, heads, groups, width, page, pages=9, columns=5, seed=0):
    """Queries, a layer's rows on scattered pages, and lengths from 1 to all there is."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, width, generator=draw)
    keys, values = torch.randn(2, pages * page, groups, width, generator=draw)
    table = torch.stack([torch.randperm(pages, generator=draw)[:columns] for _ in range(rows)])
    lengths = torch.randint(1, columns * page + 1, (rows,), generator=draw)
    lengths[0] = columns * page
    return q, StoredLayer(keys, values, None, None, width, page), table.int(), lengths.int()


def exact(q, stored, table, lengths, window):
    """Row by row in float64, from the positions themselves."""
    found = []
    for query, pages, length in zip(q.double(), table, lengths.tolist(), strict=True):
        place = torch.arange(length)[-(window or length) :]
        slots = pages.long()[place // stored.page_size] * stored.page_size
        slots = slots + place % stored.page_size
        each = q.shape[1] // stored.keys.shape[1]
        k, v = (x[slots].double().repeat_interleave(each, 1) for x in (stored.keys, stored.values))
        weights = torch.softmax(torch.einsum("hd,phd->hp", query, k) * q.shape[2] ** -0.5, dim=1)
        found.append(torch.einsum("hp,phd->hd", weights, v))
    return torch.stack(found)


def attend(q, stored, table, lengths, window):
    rules = AttentionRules(window, 0.0, q.shape[2] ** -0.5, None)
    return step_ops.decode_attention(q, stored, table, lengths, rules)


@needs_compiler
@pytest.mark.parametrize(("softcap", "scale"), [(0.0, 0.3), (2.0, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_with_a_scale_and_a_soft_cap(softcap, scale, dtype):
    """In C for float32, in torch for float64."""
    q, stored, table, lengths = layer(3, 6, 3, 16, 4)
    stored = replace(stored, keys=stored.keys.to(dtype), values=stored.values.to(dtype))
    rules = AttentionRules(5, softcap, scale, None)
    found = step_ops.decode_attention(q.to(dtype), stored, table, lengths, rules)
    pages = stored.pages()
    expected = paged_attention(
        q.to(dtype), **pages, block_table=table, seq_lens=lengths, window=5, softcap=softcap,
        scale=scale,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@needs_compiler
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "page"),
    [(1, 1, 1, 1), (6, 3, 64, 16), (4, 4, 17, 4), (22, 2, 40, 32), (5, 1, 131, 3)],
)
def test_attention_of_every_shape(heads, groups, width, page, window):
    given = layer(3, heads, groups, width, page)
    found = attend(*given, window)
    torch.testing.assert_close(found.double(), exact(*given, window), rtol=2e-5, atol=2e-6)


@needs_compiler
def test_large_scores_neither_overflow_nor_vanish():
    q, stored, table, lengths = layer(2, 4, 2, 32, 16)
    found = attend(q * 200, stored, table, lengths, None)
    expected = exact(q * 200, stored, table, lengths, None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("first", [0, 64])
def test_overflowing_scores_have_no_weight(first):
    """64 of them in a row: one block of what the loop takes at a time. NaN is not hidden so."""
    q, stored, table, lengths = layer(1, 4, 2, 32, 16, columns=9)
    q = q.abs() * 1e20
    place = torch.arange(first, first + 64)
    slots = table[0].long()[place // 16] * 16 + place % 16
    stored.keys.mul_(1e-20)
    stored.keys[slots] = -1e20
    expected = exact(q, stored, table, lengths, None)
    found = attend(q, stored, table, lengths, None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    stored.keys[slots] = torch.nan
    assert attend(q, stored, table, lengths, None).isnan().all()


@needs_compiler
def test_nothing_past_a_length_is_read():
    q, stored, table, lengths = layer(1, 4, 2, 32, 4)
    lengths[0] = 6
    before = attend(q, stored, table, lengths, None)
    last = int(table[0, 1])
    stored.keys[last * 4 + 2 : last * 4 + 4] = torch.nan
    stored.values[last * 4 + 2 : last * 4 + 4] = torch.nan
    assert torch.equal(attend(q, stored, table, lengths, None), before)


@needs_compiler
def test_threads_share_the_rows(in_threads):
    given = layer(8, 16, 8, 64, 16, columns=9)
    alone, shared = (in_threads(n, attend, *given, None) for n in (1, 3))
    assert torch.equal(alone, shared)


@needs_compiler
def test_a_row_does_not_depend_on_the_others():
    q, stored, table, lengths = layer(5, 6, 3, 48, 8)
    together = attend(q, stored, table, lengths, None)
    for row in range(5):
        part = slice(row, row + 1)
        alone = attend(q[part], stored, table[part], lengths[part], None)
        assert torch.equal(alone, together[part])


@needs_compiler
def test_positions_and_slots_of_any_integer_dtype_and_layout():
    q, stored, table, lengths = layer(3, 4, 2, 8, 4)
    before = attend(q, stored, table, lengths, None)
    wide, apart = table.long(), torch.stack((lengths, lengths), dim=1)[:, 0]
    assert torch.equal(attend(q, stored, wide, lengths.long(), None), before)
    assert torch.equal(attend(q, stored, table, apart, None), before)
    angles, qkv = torch.rand(30, 4), torch.randn(3, 8 * 8)
    turn = Rope(angles.cos(), angles.sin(), None, None, 1e-5)
    places, answers = torch.tensor([[3, 9], [29, 9], [0, 9]]), []
    for given in (places[:, 0].contiguous(), places[:, 0], places[:, 0].int()):
        keys, values = torch.zeros(2, 36, 2, 8)
        there = StoredLayer(keys, values, None, None, 8, page_size=4)
        answers.append((step_ops.rope_and_append(qkv, turn, given, given, there), keys, values))
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))


@needs_compiler
def test_attention_over_no_keys_is_zero():
    q, stored, table, lengths = layer(2, 4, 2, 8, 4)
    lengths[1] = 0
    found = attend(q, stored, table, lengths, None)
    assert torch.isfinite(found).all()
    assert not found[1].any()
    assert attend(q[:0], stored, table[:0], lengths[:0], None).shape == (0, 4, 8)


@needs_compiler
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_rope_and_append_matches_torch(monkeypatch, normed, turned):
    torch.manual_seed(0)
    rows, heads, groups, width = 5, 6, 2, 10
    qkv = torch.randn(rows, (heads + 2 * groups) * width)
    angles = torch.rand(30, width // 2)
    turn = Rope(
        *((angles.cos(), angles.sin()) if turned else (None, None)),
        *(torch.rand(2, width) if normed else (None, None)),
        1e-5,
    )
    positions, slots = torch.tensor([3, 29, 0, 7, 7]), torch.tensor([4, -1, 11, 0, 2])
    given, answers = qkv.clone(), []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(compiled_ops, "suits", lambda *_: False)
        keys, values = torch.zeros(2, 12, groups, width)
        stored = StoredLayer(keys, values, None, None, width, page_size=4)
        answers.append(
            (step_ops.rope_and_append(qkv, turn, positions, slots, stored), keys, values)
        )
    assert torch.equal(qkv, given)
    for ours, torchs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-6)


@needs_compiler
def test_add_norm_matches_torch():
    torch.manual_seed(0)
    x, delta, weight = torch.randn(7, 33), torch.randn(7, 33), torch.rand(33)
    y, total = compiled_ops.add_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    exactly = total.double() * weight / (total.double().square().mean(1, True) + 1e-5).sqrt()
    torch.testing.assert_close(y.double(), exactly, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("no_compiler")
def test_torch_serves_without_a_compiler():
    given = layer(3, 6, 3, 16, 4)
    found = attend(*given, 5)
    torch.testing.assert_close(found.double(), exact(*given, 5), rtol=2e-5, atol=2e-6)
    x, weight = both(4, 6, 8)
    assert torch.equal(linear_few_rows.linear(x, weight), functional.linear(x, weight))


def test_torch_serves_other_inputs():
    q, stored, *_ = layer(2, 4, 2, 8, 4)
    assert not compiled_ops.suits(q.half(), stored.keys)
    assert not compiled_ops.suits(q.transpose(0, 1), stored.keys)
    assert not compiled_ops.suits(q.clone().requires_grad_(), stored.keys)


def both(rows, outputs, inputs, seed=0):
    torch.manual_seed(seed)
    return torch.randn(rows, inputs), torch.randn(outputs, inputs)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 11, 15, 32, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 3), (16, 64), (37, 131), (3, 400)])
def test_every_count_of_rows_outputs_and_inputs(rows, outputs, inputs):
    x, weight = both(rows, outputs, inputs)
    exact = x.double() @ weight.double().T
    found = linear_few_rows.linear(x, weight)
    assert found.shape == (rows, outputs)
    assert (found - exact).norm() <= 1e-6 * exact.norm()


@needs_compiler
def test_threads_share_the_outputs(in_threads):
    given = both(8, 1500, 384)
    alone, shared = (in_threads(n, linear_few_rows.linear, *given) for n in (1, 3))
    assert torch.equal(alone, shared)


@needs_compiler
def test_rows_of_a_product_are_independent():
    """An answer is the same in every batch that has the compiled product."""
    x, weight = both(8, 43, 70)
    whole = linear_few_rows.linear(x, weight)
    for count in range(2, 8):
        assert torch.equal(linear_few_rows.linear(x[:count], weight), whole[:count])


def test_products_of_views():
    x, weight = both(6, 24, 48)
    assert torch.equal(
        linear_few_rows.linear(x[:, ::2], weight[:12, :24].contiguous()),
        linear_few_rows.linear(x[:, ::2].contiguous(), weight[:12, :24].contiguous()),
    )
    turned = weight.T.contiguous().T
    torch.testing.assert_close(linear_few_rows.linear(x, turned), functional.linear(x, weight))


def test_torch_serves_other_products():
    x, weight = both(4, 6, 8)
    bias = torch.arange(6.0)
    assert torch.equal(linear_few_rows.linear(x, weight, bias), functional.linear(x, weight, bias))
    half = x.bfloat16(), weight.bfloat16()
    assert torch.equal(linear_few_rows.linear(*half), functional.linear(*half))
    weight.requires_grad_()
    linear_few_rows.linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, 8))
