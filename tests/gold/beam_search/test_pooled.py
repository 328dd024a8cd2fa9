"""The policy `pooled`: finished and live beams share the places by length-penalised score."""

import numpy as np
import pytest

from trapline.gold.beam_search import oracle
from trapline.gold.beam_search.api import beam_search
from trapline.gold.errors import RangeError


class Random:
    """A model whose rows depend on the prefix alone."""

    def __init__(self, seed, vocabulary, bonus=0.0):
        self.seed, self.vocabulary, self.bonus = seed, vocabulary, bonus

    def row(self, prefix):
        rng = np.random.default_rng([self.seed, len(prefix), *prefix])
        logits = 1.5 * rng.standard_normal(self.vocabulary)
        logits[0] += self.bonus
        return logits - np.log(np.exp(logits).sum())

    def log_probs(self, prefixes):
        return np.stack([self.row(tuple(prefix)) for prefix in prefixes])


def found(model, prompts, **settings):
    beams = beam_search(model, prompts, eos_id=0, policy="pooled", **settings)
    return [[(list(beam.tokens), beam.score) for beam in group] for group in beams]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -0.5])
def test_the_search_agrees_with_the_oracle(penalty):
    prompts = [[1], [2, 3], [1, 2, 2]]
    for seed in range(12):
        model = Random(seed, 4 + seed % 5, bonus=seed % 3 - 1.0)
        settings = {"beam_width": 1 + seed % 4, "max_new_tokens": 5, "length_penalty": penalty}
        got = found(model, prompts, **settings)
        for prompt, group in zip(prompts, got, strict=True):
            want = oracle.search_one_pooled(model.row, prompt, eos_id=0, **settings).hypotheses
            assert [tokens for tokens, _ in group] == [h.tokens for h in want]
            assert [s for _, s in group] == pytest.approx([h.score for h in want])


@pytest.mark.parametrize("seed", range(8))
def test_one_beam_without_penalty_is_greedy(seed):
    model = Random(seed, 6, bonus=1.0)
    tokens = []
    while len(tokens) < 6 and 0 not in tokens:
        tokens.append(int(model.row((1, *tokens)).argmax()))
    ((best,),) = found(model, [[1]], beam_width=1, max_new_tokens=6, length_penalty=0.0)
    assert best[0] == tokens


def table(rows):
    class Table:
        def log_probs(self, prefixes):
            return np.stack([rows.get(tuple(p), np.full(4, -40.0 - len(p))) for p in prefixes])

    return Table()


def test_a_finished_beam_loses_its_place_to_two_better_ones():
    after = {(9,): np.array([-1.05, -1.0, -9.0, -50.0]), (9, 1): np.array([-50, -0.1, -0.2, -50])}
    for steps, want in ((1, [[1], [0]]), (2, [[1, 1], [1, 2]])):
        got = found(table(after), [[9]], beam_width=2, max_new_tokens=steps, length_penalty=1.0)
        assert [tokens for tokens, _ in got[0]] == want


def test_an_end_below_the_places_is_not_kept():
    """Where `canonical` keeps each end, `pooled` keeps those that hold a place."""
    after = {(9,): np.array([-2.0, -1.0, -1.5, -50.0])}
    settings = {"beam_width": 2, "max_new_tokens": 2, "length_penalty": 0.0}
    assert [0] not in [tokens for tokens, _ in found(table(after), [[9]], **settings)[0]]
    kept = beam_search(table(after), [[9]], eos_id=0, **settings)[0]
    assert (0,) in [beam.tokens for beam in kept]


def test_the_end_stays_while_nothing_better_comes():
    after = {(9,): np.array([-3.0, -4.0, -60.0, -60.0]), (9, 1): np.array([-8.0, -1.0, -60.0, -60])}
    settings = {"beam_width": 2, "max_new_tokens": 2, "length_penalty": 0.0}
    (best, second) = found(table(after), [[9]], **settings)[0]
    assert best == ([0], -3.0)
    assert second == ([1, 1], -5.0)


def test_the_device_search_refuses_the_policy():
    torch = pytest.importorskip("torch")
    from trapline.gold.beam_search.api import checked_rules
    from trapline.gold.beam_search.batched_search import BatchedSearch

    rules, _ = checked_rules(2, 4, 0, policy="pooled")
    with pytest.raises(RangeError, match="policy 'pooled' is not available"):
        BatchedSearch(rules, [1], torch.device("cpu"))
