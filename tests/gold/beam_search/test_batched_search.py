"""`BatchedSearch` equals `Search`, ties included; its kernel equals it bit for bit."""

import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from trapline.gold.beam_search.api import beam_search
from trapline.gold.beam_search.batched_search import BatchedSearch, Offered
from trapline.gold.beam_search.policy import Rules, named

POLICIES = [("canonical", None), ("vllm", None), ("hf", False), ("hf", True), ("hf", "never")]


class RandomModel:
    """Log-probabilities that depend on the whole prefix; coarse ones have many ties."""

    def __init__(self, seed, vocabulary, spread, *, coarse):
        self.seed, self.vocabulary, self.spread, self.coarse = seed, vocabulary, spread, coarse

    def row(self, prefix):
        rng = np.random.default_rng(zlib.crc32(bytes([self.seed % 251, *prefix])))
        logits = rng.normal(size=self.vocabulary) * self.spread
        logits = np.round(logits) if self.coarse else logits
        if rng.random() < 0.3:
            logits[rng.integers(self.vocabulary)] = -np.inf
        return torch.log_softmax(torch.tensor(logits, dtype=torch.float32), dim=-1)

    def log_probs(self, prefixes):
        return torch.stack([self.row(prefix) for prefix in prefixes]).double().numpy()


def by_batched_search(model, prompts, rules):
    """Queries the model for all beams, dead ones too, as a captured step does."""
    width = rules.beam_width
    kept = min((1 + len(rules.eos_ids)) * width, model.vocabulary)
    search = BatchedSearch(rules, [len(prompt) for prompt in prompts], torch.device("cpu"))
    paths = [[list(prompt)] * width for prompt in prompts]
    for _ in range(rules.max_new_tokens):
        rows = torch.stack([model.row(path) for group in paths for path in group])
        best = torch.sort(rows, dim=1, descending=True, stable=True)
        ends = rows[:, list(rules.eos_ids)]
        parents, tokens = search.advance(
            Offered(best.values[:, :kept], best.indices[:, :kept], ends)
        )
        chosen = [[x[b].tolist() for x in (parents, tokens)] for b in range(len(prompts))]
        paths = [
            [[*paths[b][p], t] for p, t in zip(*chosen[b], strict=True)]
            for b in range(len(prompts))
        ]
        if not search.is_alive():
            break
    return search.beams(width)


def compare_cases(count, seed):
    rng = random.Random(seed)
    for number in range(count):
        vocabulary = rng.choice([3, 4, 6, 11])
        ends = tuple(sorted(rng.sample(range(vocabulary), rng.choice([1, 1, 2]))))
        policy, early_stopping = POLICIES[number % len(POLICIES)]
        penalty, width, steps = rng.choice([-1, -0.5, 0, 0.6, 1, 2]), rng.randint(1, 5), 6
        model = RandomModel(number, vocabulary, rng.choice([0.3, 1, 3]), coarse=number % 3 == 0)
        prompts = [[rng.randrange(vocabulary) for _ in range(1 + i)] for i in range(3)]
        expected = beam_search(
            model,
            prompts,
            beam_width=width,
            max_new_tokens=steps,
            eos_id=ends,
            length_penalty=penalty,
            policy=policy,
            early_stopping=early_stopping,
        )
        rules = Rules(width, steps, ends, float(penalty), named(policy, early_stopping))
        assert by_batched_search(model, prompts, rules) == expected, (number, rules)


def test_beams_scores_and_ties_equal_the_search():
    compare_cases(60, seed=0)


@pytest.mark.full
def test_beams_scores_and_ties_equal_the_search_many_times():
    compare_cases(3000, seed=1)


def test_fewer_candidates_than_beams_leave_dead_beams():
    """Two tokens, one of them the end: one beam lives."""
    rules = Rules(3, 2, (1,), 1.0, named("canonical"))
    model = RandomModel(5, 2, 1.0, coarse=False)
    search = BatchedSearch(rules, [1], torch.device("cpu"))
    rows = torch.stack([model.row([0])] * 3)
    best = torch.sort(rows, dim=1, descending=True, stable=True)
    search.advance(Offered(best.values, best.indices, rows[:, [1]]))
    assert (search.sums > -torch.inf).tolist() == [[True, False, False]]
    search.reset()
    assert search.sums.tolist() == [[0.0, -torch.inf, -torch.inf]]


def test_interpreted_kernel_equals_batched_search_bit_for_bit(tmp_path, run_script):
    pytest.importorskip("triton")
    run_script(Path(__file__).parent / "interpret_advance.py", tmp_path, TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "boards.json").read_text())
    assert len(found) == 12
    for entry in found:
        assert not entry["wrong"], entry
        assert entry["broken"] == 0


def test_kernel_compiles_for_hopper(compiled):
    """Every rule that ends hypotheses, and every rule that stops a search."""
    pytest.importorskip("triton")
    assert len(compiled(Path(__file__).parent / "compile_advance.py")) == 6


def greedy(model, prompt, end, steps):
    said = []
    while len(said) < steps and end not in said:
        said.append(int(model.row([*prompt, *said]).argmax()))
    return tuple(said)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_one_beam_without_penalty_is_greedy_under_hf(early_stopping):
    for seed in range(40):
        model = RandomModel(seed, 6, 1.0, coarse=False)
        options = {"beam_width": 1, "max_new_tokens": 8, "eos_id": 2, "length_penalty": 0.0}
        options |= {"policy": "hf", "early_stopping": early_stopping}
        ((beam,),) = beam_search(model, [[1, 3]], **options)
        assert beam.tokens == greedy(model, [1, 3], 2, 8)


@pytest.mark.parametrize("policy", ["canonical", "vllm"])
def test_one_beam_may_end_before_the_greedy_sequence_does(policy):
    """As the policies' docstring says: a less likely end can have the higher sum."""

    class Ending:
        def log_probs(self, prefixes):
            return np.log([[0.45, 0.15, 0.4]] * len(prefixes))  # token 2 is the end

    options = {"beam_width": 1, "max_new_tokens": 4, "eos_id": 2, "length_penalty": 0.0}
    ((beam,),) = beam_search(Ending(), [[1]], policy=policy, **options)
    assert beam.tokens == (2,)
