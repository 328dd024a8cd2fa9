"""Beam search over a paged cache: pages fork, nothing is copied, and the answers are the same."""

import numpy as np
import pytest

from trapline.gold import KVCache, beam_search
from trapline.gold.kv_cache.oracle import attention
from trapline.gold.kv_cache.reorder import follow

VOCABULARY, WIDTH, LAYERS, PAGE = 7, 8, 2, 4


class Model:
    """A small attention model with random weights; asked by prefix, it computes everything."""

    def __init__(self, seed):
        rng = np.random.default_rng([seed, 3])
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH))
        self.weights = rng.standard_normal((LAYERS, 3, WIDTH, WIDTH)) / np.sqrt(WIDTH)
        self.head = rng.standard_normal((WIDTH, VOCABULARY)) / np.sqrt(WIDTH)

    def layers(self, tokens, start, attend):
        """Log-probabilities after the last token; `attend(layer, q, k, v)` knows the past."""
        place = np.sin(np.arange(start, start + len(tokens))[:, None] / (1 + np.arange(WIDTH)))
        x = self.embedding[list(tokens)] + place
        for layer, (q, k, v) in enumerate(self.weights):
            x = x + attend(layer, *((x @ w)[:, None] for w in (q, k, v)))[:, 0]
        logits = x[-1] @ self.head
        return logits - np.log(np.exp(logits).sum())

    def log_probs(self, prefixes):
        return np.stack(
            [self.layers(p, 0, lambda _, q, k, v: attention(q, k, v)) for p in prefixes]
        )


class WithCache(Model):
    """The same model with a paged cache: one new token a row and step."""

    def __init__(self, seed, pages=64):
        super().__init__(seed)
        self.cache = KVCache(
            "paged", num_layers=LAYERS, num_kv_heads=1, head_dim=WIDTH, block_size=PAGE,
            num_blocks=pages,
        )  # fmt: skip
        self.seqs = []
        self.most_pages = 0
        self.computed = 0

    def start(self, prompts):
        self.seqs = [self.cache.add() for _ in prompts]
        return self._step(prompts)

    def follow(self, parents, tokens):
        self.seqs = follow(self.cache, self.seqs, parents)
        return self._step([[token] for token in tokens])

    def _step(self, new):
        rows = [self._one(seq, tokens) for seq, tokens in zip(self.seqs, new, strict=True)]
        book = self.cache._storage.book
        self.most_pages = max(self.most_pages, book.num_pages - book.free_pages)
        self.computed += sum(map(len, new))
        return np.stack(rows)

    def _one(self, seq, tokens):
        def attend(layer, q, k, v):
            self.cache.append(seq, layer, k, v)
            return self.cache.attend(seq, layer, q)

        return self.layers(tokens, self.cache.length(seq), attend)


PROMPTS = [[1, 2, 3, 4, 5, 6, 0, 1, 2], [3], [5, 5, 5, 2]]


@pytest.mark.parametrize("policy", ["canonical", "hf", "vllm"])
@pytest.mark.parametrize("seed", range(6))
def test_cached_search_equals_uncached_search(seed, policy):
    settings = {
        "beam_width": 4, "max_new_tokens": 7, "eos_id": [0, 6], "length_penalty": 0.7,
        "policy": policy,
    }  # fmt: skip
    want = beam_search(Model(seed), PROMPTS, **settings)
    got = beam_search(WithCache(seed), PROMPTS, **settings)
    for ours, theirs in zip(got, want, strict=True):
        assert [beam.tokens for beam in ours] == [beam.tokens for beam in theirs]
        np.testing.assert_allclose([b.score for b in ours], [b.score for b in theirs], rtol=1e-9)


def test_a_prompt_is_stored_once_for_all_its_beams():
    """40 positions are 10 pages; each of 6 beams may add the pages of its own 5 tokens."""
    model = WithCache(1, pages=64)
    prompt = [1 + i % 5 for i in range(40)]
    beam_search(model, [prompt], beam_width=6, max_new_tokens=5, eos_id=0)
    assert model.most_pages <= 10 + 6 * 2
    assert model.computed <= 40 + 6 * 4


def test_finished_prompts_free_their_pages():
    model = WithCache(2)
    beam_search(model, PROMPTS, beam_width=3, max_new_tokens=6, eos_id=[0, 1, 2, 3, 4])
    assert set(model.cache._counts) == set(model.seqs)  # rows of the last step, and no others
    assert len(model.seqs) < 3 * len(PROMPTS)
