"""Sampling: the law of the output is the target's, exactly, by enumeration of all luck.

The same test is shown to fail for the biased ways of verification that are found in the wild.
"""

import itertools
from collections import defaultdict
from functools import lru_cache

import numpy as np
import pytest
import torch

from trapline.gold.decoder import sampling as decoder_sampling
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.tree_decoding import numpy_tree, oracle
from trapline.gold.tree_decoding.generate import generate

VOCAB = 3


class Enumerated:
    """Luck that goes through all its outcomes: follows a script, then takes the first option."""

    def __init__(self, script):
        self.script, self.step, self.probability = list(script), 0, 1.0
        self.untried = []

    def draw(self, law):
        options = [token for token in range(len(law)) if law[token] > 0.0]
        if self.step == len(self.script):
            self.untried += [[*self.script, option] for option in options[1:]]
            self.script.append(options[0])
        chosen = self.script[self.step]
        self.step += 1
        self.probability *= float(law[chosen])
        return chosen

    def coin(self, node, probability):
        return bool(self.draw([1.0 - probability, probability]))


def exact_law(experiment):
    """The law of what an experiment with luck answers."""
    found = defaultdict(float)
    scripts = [[]]
    while scripts:
        chance = Enumerated(scripts.pop())
        found[experiment(chance)] += chance.probability
        scripts += chance.untried
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return found


@lru_cache
def node_law(seed, prefix):
    return np.random.default_rng([seed, *prefix]).dirichlet(np.full(VOCAB, 0.7))


def distance(verifier, seed):
    """How far the law of two output tokens is from the target's, at its worst."""
    q = np.stack([node_law(seed + 100, (d,)) for d in range(2)])

    def experiment(chance):
        tokens, parents, draft = verifier.tree(q, chance)
        branches = [oracle.ancestors(parents, n) for n in range(len(tokens))]
        prefixes = [(), *(tuple(tokens[n] for n in branch) for branch in branches)]
        target = np.stack([node_law(seed, prefix) for prefix in prefixes])
        path, bonus = verifier.verify(tokens, parents, draft, target, chance)
        said = [*(tokens[n] for n in path), bonus]
        while len(said) < 2:
            said.append(chance.draw(node_law(seed, tuple(said))))
        return tuple(said[:2])

    got = exact_law(experiment)
    want = {
        (a, b): node_law(seed, ())[a] * node_law(seed, (a,))[b]
        for a, b in itertools.product(range(VOCAB), repeat=2)
    }
    return max(abs(got[pair] - want[pair]) for pair in want)


class SampleAndMatch:
    """Ours: one sample of the target a row, drawn before the children are looked at."""

    def tree(self, q, chance):
        tokens, parents = oracle.build_tree(np.log(q), 4)
        return tokens.tolist(), parents.tolist(), None

    def verify(self, tokens, parents, draft, target, chance):
        choices = np.array([chance.draw(row) for row in target])
        return numpy_tree.accepted_branch(np.array(tokens), np.array(parents), choices)


class RedrawnPerChild(SampleAndMatch):
    """Biased: every child gets a sample of its own."""

    def verify(self, tokens, parents, draft, target, chance):
        path, node = [], -1
        while True:
            children = [n for n in range(len(tokens)) if parents[n] == node]
            hit = next((c for c in children if chance.draw(target[node + 1]) == tokens[c]), None)
            if hit is None:
                return path, chance.draw(target[node + 1])
            path.append(hit)
            node = hit


class SoftmaxRatioOfAnArgmax:
    """Biased: the draft is the most likely token, but is judged as if it had been drawn."""

    def tree(self, q, chance):
        return q.argmax(axis=1).tolist(), [-1, 0], np.concatenate([q, q[-1:]])

    def verify(self, tokens, parents, draft, target, chance):
        return oracle.verify_rejection(tokens, parents, draft, target, chance, replacement=True)


class Drawn:
    """Ours: children that are drawn, multi-round rejection with the residual kept up to date."""

    def __init__(self, replacement):
        self.replacement = replacement

    def tree(self, q, chance):
        tokens, parents = [], []
        for depth, level in ((0, [-1]), (1, [0, 1])):
            for parent in level:
                left = q[depth]
                for _ in range(2):
                    tokens.append(chance.draw(left))
                    parents.append(parent)
                    if not self.replacement:
                        left = np.where(np.arange(VOCAB) == tokens[-1], 0.0, left)
                        left = left / left.sum()
        return tokens, parents, np.stack([q[0], *[q[1]] * 6])

    def verify(self, tokens, parents, draft, target, chance):
        return oracle.verify_rejection(
            tokens, parents, draft, target, chance, replacement=self.replacement
        )


class StaleResidual(Drawn):
    """Biased: after a refusal the next child is judged by the whole law again."""

    def verify(self, tokens, parents, draft, target, chance):
        path, node = [], -1
        while True:
            p, q = target[node + 1], draft[node + 1]
            children = [n for n in range(len(tokens)) if parents[n] == node]
            odds = ((c, min(1.0, p[tokens[c]] / q[tokens[c]])) for c in children)
            hit = next((c for c, odd in odds if chance.coin(c, odd)), None)
            if hit is None:
                rest = np.maximum(p - q, 0.0)
                return path, chance.draw(rest / rest.sum() if rest.sum() > 0 else p)
            path.append(hit)
            node = hit


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("verifier", [SampleAndMatch(), Drawn(True), Drawn(False)])
def test_output_follows_the_target_distribution(verifier, seed):
    assert distance(verifier, seed) < 1e-12


@pytest.mark.parametrize(
    "verifier", [RedrawnPerChild(), SoftmaxRatioOfAnArgmax(), StaleResidual(True)]
)
def test_biased_verification_fails_the_same_test(verifier):
    assert max(distance(verifier, seed) for seed in range(3)) > 0.01


def eighths(tables):
    rng = np.random.default_rng(1)
    laws = rng.multinomial(8, np.full(VOCAB, 1 / VOCAB), size=tables.size) / 8
    with np.errstate(divide="ignore"):
        return laws, tables.Target(np.log(laws))


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("name", ["right", "random", "repeating"])
def test_generation_over_a_grid_has_the_exact_distribution(tables, monkeypatch, name, mode):
    """Laws of eighths, three tokens, one number of eight in each position: 512 answers."""
    laws, target = eighths(tables)
    numbers = (torch.tensor(list(itertools.product(range(8), repeat=3))) + 0.5) / 8

    def on_the_grid(seed, number):
        # Beyond the third token nothing is said; a number is asked for all the same.
        return numbers.double()[seed, number.clamp(max=2)]

    monkeypatch.setattr(decoder_sampling, "uniforms", on_the_grid)
    kind = tables.drafters[name]
    drafter = kind(target) if name == "right" else kind(VOCAB)
    ways = [Sampling(temperature=1.0, seed=number) for number in range(512)]
    options = {"max_new_tokens": 3, "sampling": ways, "mode": mode, "budget": 6, "batch": 512}
    done = generate(target, drafter, [[1, 0]] * 512, **options)
    counts = defaultdict(int)
    for answer in done.tokens:
        counts[tuple(answer)] += 1
    for said in itertools.product(range(VOCAB), repeat=3):
        want = 512.0
        for length, token in enumerate(said):
            want *= laws[tables.state_of([1, 0, *said[:length]]), token]
        assert counts[said] == want


def interval(logits, token, temperature, top_k=VOCAB, top_p=1.0):
    """Which numbers belong to a token: the law laid out from the most likely token on."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights, kind="stable")[:top_k]
    law = weights[order] / (weights[order].sum() if top_k < VOCAB else weights.sum())
    law = law * (np.cumsum(law) - law < top_p)
    ends = np.cumsum(law / law.sum())
    place = order.tolist().index(token) if token in order else None
    return (0.0, 0.0) if place is None else (ends[place] - law[place] / law.sum(), ends[place])


@pytest.mark.parametrize(
    "way",
    [{"temperature": 0.5}, {"temperature": 1.5, "top_p": 0.8}, {"temperature": 1.0, "top_k": 2}],
)
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_grid_numbers_per_answer_match_its_probability(tables, monkeypatch, mode, way):
    """Both ends and the middle of every interval of the inverted law, for every answer."""
    target = tables.Target(np.random.default_rng(2).standard_normal((tables.size, VOCAB)))
    cases = []
    for said in itertools.product(range(VOCAB), repeat=2):
        spans = []
        for length, token in enumerate(said):
            logits = target.table[tables.state_of([2, *said[:length]])]
            spans.append(interval(logits.numpy(), token, **way))
        if all(low < high for low, high in spans):
            for share in (1e-4, 0.5, 1 - 1e-4):
                cases.append((said, [low + share * (high - low) for low, high in spans]))

    numbers = torch.tensor([chosen for _, chosen in cases], dtype=torch.float64)
    monkeypatch.setattr(
        decoder_sampling, "uniforms", lambda seed, number: numbers[seed, number.clamp(max=1)]
    )
    ways = [Sampling(**way, seed=number) for number in range(len(cases))]
    drafter = tables.drafters["random"](VOCAB)
    options = {"max_new_tokens": 2, "sampling": ways, "mode": mode, "budget": 5, "batch": 64}
    done = generate(target, drafter, [[2]] * len(cases), **options)
    assert [tuple(answer) for answer in done.tokens] == [said for said, _ in cases]
