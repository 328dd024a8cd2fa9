"""The static step: the same logits as the plain path, whatever rows come and go."""

import pytest
import torch

from trapline.gold.attention.paged.api import paged_attention
from trapline.gold.decoder import graphed_step
from trapline.gold.decoder.config import AttentionRules
from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.graphed_step import GraphedStep, StepRow, _shared_prefixes
from trapline.gold.decoder.pool import Pool, StoredLayer
from trapline.gold.decoder.sampling import Sampling, TokenSampler
from trapline.gold.decoder.step_ops import SharedPrefix, decode_attention
from trapline.gold.errors import RangeError

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8]]


def pool_of(decoder, pages=24, size=4):
    return Pool(decoder.config, pages, size, decoder.norm.weight.dtype, decoder.device)


def opened(decoder, pool, prompts, room=12):
    """Prompts in the pool, with room reserved for what follows."""
    rows = []
    for prompt in prompts:
        sequence = pool.open()
        sequence.reserve(len(prompt) + room)
        decoder.step([prompt], [sequence])
        rows.append(sequence)
    return rows


def plain(decoder, prompt, tokens):
    return decoder(torch.tensor([prompt + tokens]))[0, -1]


def test_a_pool_serves_as_a_cache(decoder):
    pool = pool_of(decoder)
    sequence = pool.open()
    for piece in ([3, 1, 4], [1], [5, 9, 2, 6, 5]):
        logits = decoder.step([piece], [sequence])
    torch.testing.assert_close(
        logits[0], plain(decoder, [3, 1, 4, 1, 5, 9, 2, 6, 5], []), rtol=1e-5, atol=1e-5
    )
    twin = sequence.fork()
    assert twin.table == sequence.table
    one, two = decoder.step([[7]], [twin]), decoder.step([[8]], [sequence])
    assert twin.table[-1] != sequence.table[-1]  # the shared page was copied before writing
    for logits, last in ((one, 7), (two, 8)):
        expected = plain(decoder, [3, 1, 4, 1, 5, 9, 2, 6, 5], [last])
        torch.testing.assert_close(logits[0], expected, rtol=1e-5, atol=1e-5)
    twin.free()
    sequence.free()
    assert pool.book.free_pages == 24


def test_graphed_logits_match_the_readable_path(decoder):
    pool = pool_of(decoder)
    rows = opened(decoder, pool, PROMPTS)
    step = GraphedStep(decoder, pool, rows=4, pages=8)
    said = [[], [], []]
    for token in range(5, 12):
        step.load([StepRow(row, token + i, 0) for i, row in enumerate(rows)])
        logits = step.logits()
        for i, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
            said[i].append(token + i)
            row.advance(1)
            expected = plain(decoder, prompt, said[i])
            torch.testing.assert_close(logits[i], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [None, 5])
def test_decode_attention_is_paged_attention(window, softcap):
    """Ragged rows, scattered pages, and two rows whose shared beginning is read once."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 9 * 4, 2, 6)
    q = torch.randn(4, 6, 6)
    table = torch.tensor([[5, 0, 3, 7], [1, 2, 8, 0], [1, 2, 8, 4], [6, 0, 0, 0]]).int()
    lengths = torch.tensor([14, 12, 13, 1]).int()
    pages = [stored.view(9, 4, 2, 6).transpose(1, 2) for stored in (keys, values)]
    rules = AttentionRules(window, softcap, 0.7, None)
    options = {"window": window, "softcap": softcap, "scale": 0.7}
    expected = paged_attention(q, *pages, table, lengths, **options)
    for shared in ([], [SharedPrefix(1, 3, 2)]):
        stored = StoredLayer(keys, values, None, None, 6, page_size=4)
        found = decode_attention(q, stored, table, lengths, rules, shared)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_shared_prefixes_are_found(monkeypatch):
    monkeypatch.setattr(graphed_step, "WORTH_SHARING", 2)
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 6], [7, 8], [7, 8], [0]]
    assert _shared_prefixes(tables, [3, 3, 3, 1, 1, 0]) == [SharedPrefix(0, 3, 2)]
    assert _shared_prefixes(tables[:2], [3, 3]) == [SharedPrefix(0, 2, 3)]
    assert _shared_prefixes(tables[1:5], [3, 2, 2, 2]) == [
        SharedPrefix(0, 2, 2),
        SharedPrefix(2, 4, 2),
    ]
    assert _shared_prefixes(tables, [1] * 6) == []
    assert _shared_prefixes([], []) == []


def test_buffers_advance_by_themselves(decoder):
    """Many steps after one load, against a load before every step."""
    pools = [pool_of(decoder) for _ in range(2)]
    both = [opened(decoder, pool, PROMPTS) for pool in pools]
    steps = [GraphedStep(decoder, pool, rows=3, pages=8) for pool in pools]
    ways = [Sampling(), Sampling(1.3, seed=4), Sampling(0.8, top_k=5, seed=5)]
    chooser = TokenSampler(ways, 23, decoder.device)
    tokens = [4, 5, 6]
    steps[0].load([StepRow(row, t, 1) for row, t in zip(both[0], tokens, strict=True)])
    for made in range(1, 9):
        steps[1].load([StepRow(row, t, made) for row, t in zip(both[1], tokens, strict=True)])
        tokens = steps[1].choose(chooser).tolist()
        assert steps[0].choose(chooser).tolist() == tokens
        for row in both[1]:
            row.advance(1)


def test_joined_weights_share_memory_with_the_decoder(make):
    """Nothing is kept twice, and the plain path reads the same numbers."""
    decoder = make("qwen3")
    before = decoder(torch.tensor([[1, 2, 3]]))
    GraphedStep(decoder, pool_of(decoder), rows=1, pages=8)
    attention = decoder.layers[0].attention
    end = attention.q.weight.data_ptr() + attention.q.weight.nbytes
    assert attention.k.weight.data_ptr() == end
    assert torch.equal(decoder(torch.tensor([[1, 2, 3]])), before)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.3), ("fp8", 0.08)])
def test_quantised_steps_stay_close_to_dense_ones(make, bits, most):
    """The prompt's pages and the step's own hold codes; forks copy their scales too."""
    decoder = make("llama", head_dim=8)
    pool = Pool(decoder.config, 24, 4, torch.float32, decoder.device, bits)
    plain_bytes = pool_of(decoder).nbytes()
    per_element = 8 * 4 * pool.nbytes() / plain_bytes
    assert per_element == (4 if bits == 4 else 8) + 16 / 8  # a scale for a row of eight
    row = opened(decoder, pool, PROMPTS[:1])[0]
    twin = row.fork()
    twin.reserve(12)
    step = GraphedStep(decoder, pool, rows=2, pages=8)
    step.load([StepRow(row, 5, 0), StepRow(twin, 6, 0)])
    expected = torch.stack([plain(decoder, PROMPTS[0], [token]) for token in (5, 6)])
    error = (step.logits() - expected).norm() / expected.norm()
    assert 0 < error <= most


def test_an_engine_runs_on_quantised_pages(make):
    decoder = make("qwen3")
    engines = [Engine(decoder, rows=2, pages=16, page_size=4, bits=bits) for bits in (None, 8)]
    said = []
    for engine in engines:
        for prompt in PROMPTS:
            engine.add(prompt, max_new_tokens=4)
        said.append([token[:2] for _ in range(12) if engine.is_busy for token in engine.step()])
    assert len(said[0]) == len(said[1]) == 12
    assert engines[1].pool.nbytes() < engines[0].pool.nbytes()
    with pytest.raises(RangeError, match="bits must be 8, 4, 'fp8' or None, got 5"):
        Engine(decoder, bits=5)


def test_weights_are_joined_once(make):
    """A second step, or a search, finds them joined; what was trained since then is in them."""
    decoder = make("llama")
    pool = pool_of(decoder)
    first = GraphedStep(decoder, pool, rows=1, pages=8)
    q = decoder.layers[0].attention.q.weight
    q.data.mul_(2.0)
    place = q.data_ptr()
    second = GraphedStep(decoder, pool, rows=3, pages=8)
    assert q.data_ptr() == place
    for step in (first, second):
        (sequence,) = opened(decoder, pool, PROMPTS[:1])
        step.load([StepRow(sequence, 5, 0)])
        expected = plain(decoder, PROMPTS[0], [5])
        torch.testing.assert_close(step.logits()[0], expected, rtol=1e-4, atol=1e-4)


def test_sixteen_bit_steps_stay_close_to_the_readable_path(make):
    decoder = make("llama").to(torch.bfloat16)
    pool = pool_of(decoder)
    rows = opened(decoder, pool, PROMPTS)
    step = GraphedStep(decoder, pool, rows=3, pages=8)
    step.load([StepRow(row, 5, 0) for row in rows])
    for logits, prompt in zip(step.logits(), PROMPTS, strict=True):
        expected = plain(decoder, prompt, [5]).float()
        assert (logits.float() - expected).abs().max() <= 0.05 * expected.abs().max()


def test_too_many_rows_or_pages_are_refused(make):
    decoder = make("llama")
    pool = pool_of(decoder)
    rows = opened(decoder, pool, PROMPTS)
    with pytest.raises(RangeError, match="at most 2 rows fit, got 3"):
        GraphedStep(decoder, pool, 2, 8).load([StepRow(row, 1, 0) for row in rows])
    with pytest.raises(RangeError, match="at most 2 pages a row fit, got 5"):
        GraphedStep(decoder, pool, 2, 2).load([StepRow(rows[0], 1, 0)])
    with pytest.raises(RangeError, match="pages and page_size must be"):
        Pool(decoder.config, 0, 4, torch.float32, decoder.device)


@pytest.mark.needs_gpu
def test_captured_steps_match_eager_ones(make):
    """Greedy tokens and sampled ones from a replayed graph, against the CPU."""
    tokens = {}
    for place in ("cpu", "cuda"):
        for ways in ([Sampling()] * 3, [Sampling(), Sampling(1.0, seed=1), Sampling(0.7, 5)]):
            decoder = make("qwen3").to(place)
            pool = pool_of(decoder)
            rows = opened(decoder, pool, PROMPTS)
            step = GraphedStep(decoder, pool, rows=4, pages=8)
            step.load([StepRow(row, 5, 1) for row in rows])
            chooser = TokenSampler(ways, 23, decoder.device)
            said = [step.choose(chooser)[:3].tolist() for _ in range(8)]
            tokens.setdefault(place, []).append(said)
    assert tokens["cpu"] == tokens["cuda"]
