"""The library's beam search against the oracle, its policies, and what it refuses."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from trapline.gold import beam_search
from trapline.gold.beam_search import oracle
from trapline.gold.beam_search.api import rescore
from trapline.gold.beam_search.policy import CANONICAL, FIRST_FULL, HEURISTIC, NEVER_EARLY, named


def pairs(beams):
    return [(list(beam.tokens), beam.score) for beam in beams]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, -0.5])
def test_batches_equal_the_oracle_token_for_token_and_call_for_call(random_model, penalty, coarse):
    penalty = 0.0 if coarse else penalty  # with ties only sums, not scores, are exact
    for seed in range(8):
        rng = np.random.default_rng(seed)
        model = random_model(seed, 5, coarse=coarse, sparse=0.2)
        prompts = [(0,), (1, 1), (2, 0, 2)][: int(rng.integers(1, 4))]
        settings = {
            "beam_width": int(rng.integers(1, 6)),
            "max_new_tokens": int(rng.integers(1, 6)),
            "eos_id": int(rng.integers(5)),
            "length_penalty": penalty,
        }
        got = beam_search(model, prompts, **settings)
        want = [oracle.search_one(model.law, prompt, **settings) for prompt in prompts]
        for found, search in zip(got, want, strict=True):
            assert [list(b.tokens) for b in found] == [h.tokens for h in search.hypotheses]
            expected = [h.score for h in search.hypotheses]
            np.testing.assert_allclose([b.score for b in found], expected, rtol=1e-12)
        assert [sorted(c) for c in model.calls] == [sorted(c) for c in oracle.calls(want)]


def test_batching_does_not_change_results(random_model):
    settings = {"beam_width": 3, "max_new_tokens": 5, "eos_id": 1}
    prompts = [[0], [1, 2], [], [3, 3, 3]]
    together = beam_search(random_model(4, 4), prompts, **settings)
    alone = [beam_search(random_model(4, 4), [prompt], **settings)[0] for prompt in prompts]
    assert together == alone


def test_policies_differ_where_they_should(table_model):
    """After the first step the end is at −2 and a live beam at −2.5 that will end at −3 / 3."""
    entries = {(): {0: -2.0, 1: -2.5}, (1,): {2: -0.25}, (1, 2): {0: -0.25}}
    settings = {"beam_width": 1, "max_new_tokens": 4, "eos_id": 0}
    best = {
        policy: pairs(beam_search(table_model(entries), [[9]], policy=policy, **settings)[0])[0]
        for policy in (CANONICAL, NEVER_EARLY, HEURISTIC, FIRST_FULL)
    }
    assert best[CANONICAL] == best[NEVER_EARLY] == ([1, 2, 0], -1.0)
    assert best[HEURISTIC] == best[FIRST_FULL] == ([0], -2.0)


def test_only_the_canonical_policy_accepts_low_ranked_ends(table_model):
    entries = {(): {1: -1.0, 0: -2.0}, (1,): {2: -4.0}}
    settings = {"beam_width": 1, "max_new_tokens": 2, "eos_id": 0, "length_penalty": 0.0}
    got = {
        policy: pairs(beam_search(table_model(entries), [[9]], policy=policy, **settings)[0])
        for policy in (CANONICAL, NEVER_EARLY)
    }
    assert got[CANONICAL] == [([0], -2.0)]
    assert got[NEVER_EARLY] == [([1, 2], -5.0)]


def test_full_pool_stops_only_early_stopping(table_model):
    entries = {(): {0: -1.0, 1: -1.25}, (1,): {0: -0.25}}
    settings = {"beam_width": 1, "max_new_tokens": 3, "eos_id": 0}
    impatient = beam_search(table_model(entries), [[9]], policy=FIRST_FULL, **settings)
    patient = beam_search(table_model(entries), [[9]], **settings)
    assert pairs(impatient[0]) == [([0], -1.0)]
    assert pairs(patient[0]) == [([1, 0], -0.75)]


def greedy(law, prompt, most):
    tokens = []
    while len(tokens) < most:
        tokens.append(int(np.argmax(law((*prompt, *tokens)))))
    return tokens


def test_one_beam_is_greedy(random_model):
    """While nothing ends: the end is impossible, so that no policy finishes before the last."""
    for seed in range(20):
        model = random_model(seed, 6)
        inner = model.law
        model.law = lambda prefix, inner=inner: np.where(np.arange(6) == 5, -np.inf, inner(prefix))
        for policy in ("canonical", "hf", "vllm"):
            ((best,),) = beam_search(
                model, [[1]], beam_width=1, max_new_tokens=5, eos_id=5, policy=policy
            )
            assert list(best.tokens) == greedy(model.law, (1,), 5)
            assert not best.ended


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_one_beam_of_transformers_is_greedy_to_its_end(random_model, early, penalty):
    for seed in range(20):
        model = random_model(seed, 4)
        said = greedy(model.law, (1,), 6)
        ((best,),) = beam_search(
            model,
            [[1]],
            beam_width=1,
            max_new_tokens=6,
            eos_id=3,
            policy="hf",
            early_stopping=early,
            length_penalty=penalty,
        )
        assert list(best.tokens) == (said[: said.index(3) + 1] if 3 in said else said)


@pytest.mark.parametrize("policy", ["canonical", "hf", "vllm"])
def test_a_score_follows_from_the_tokens_bit_for_bit(random_model, policy):
    for seed in range(10):
        settings = {"eos_id": [0, 3], "length_penalty": 0.1 * seed - 0.3, "policy": policy}
        (found,) = beam_search(
            random_model(seed, 6), [[2, 2]], beam_width=4, max_new_tokens=6, **settings
        )
        for beam in found:
            assert beam.score == rescore(random_model(seed, 6), [2, 2], beam.tokens, **settings)
            assert beam.ended == (beam.tokens[-1] in (0, 3))
            assert not {0, 3} & set(beam.tokens[:-1])
    with pytest.raises(ValueError, match="must not be empty"):
        rescore(random_model(0, 6), [1], [], eos_id=0)


def test_the_n_best_are_the_first_of_all(random_model):
    settings = {"beam_width": 5, "max_new_tokens": 4, "eos_id": 0}
    (everything,) = beam_search(random_model(3, 5), [[1]], **settings)
    (some,) = beam_search(random_model(3, 5), [[1]], n_best=2, **settings)
    assert some == everything[:2]


def test_several_end_tokens_act_as_one(random_model):
    """With two ends a search must find what one whose ends are merged by hand would find."""
    law = random_model(7, 5).law
    (found,) = beam_search(
        random_model(7, 5), [[1]], beam_width=5**3, max_new_tokens=3, eos_id=(4, 2)
    )
    got = {beam.tokens: beam.score for beam in found}
    want = {}
    for a in range(5):
        for b in range(5):
            for c in range(5):
                tokens = (a, b, c)
                cut = next((i for i, t in enumerate(tokens) if t in (2, 4)), 2)
                tokens = tokens[: cut + 1]
                total = sum(law((1, *tokens[:i]))[t] for i, t in enumerate(tokens))
                want[tokens] = total / len(tokens)
    assert got == pytest.approx(want, rel=1e-12)


def test_names_of_policies():
    assert named("canonical") is CANONICAL
    assert [named("hf", way) for way in ("never", False, None, True)] == [
        NEVER_EARLY, HEURISTIC, HEURISTIC, FIRST_FULL,
    ]  # fmt: skip


def test_empty_batch_does_not_call_the_model():
    assert beam_search(None, [], beam_width=1, max_new_tokens=1, eos_id=0) == []


def test_prompts_are_not_modified(random_model):
    prompts = [[1, 2], [3]]
    beam_search(random_model(0, 4), prompts, beam_width=2, max_new_tokens=3, eos_id=0)
    assert prompts == [[1, 2], [3]]


@pytest.mark.parametrize(
    "change",
    [
        {"beam_width": 0},
        {"beam_width": 1.5},
        {"max_new_tokens": 0},
        {"eos_id": -1},
        {"eos_id": 4},
        {"eos_id": []},
        {"eos_id": [0, 4]},
        {"eos_id": [0, -1]},
        {"n_best": 0},
        {"n_best": 3},
        {"policy": "greedy"},
        {"policy": "hf", "early_stopping": "sometimes"},
        {"early_stopping": True},
        {"length_penalty": math.nan},
        {"length_penalty": -math.inf},
        {"length_penalty": 1e4},
        {"length_penalty": -1e4},
        {"length_penalty": 80.0, "policy": "vllm"},
    ],
)
def test_bad_settings_are_refused(random_model, change):
    settings = {"beam_width": 2, "max_new_tokens": 2, "eos_id": 0, **change}
    with pytest.raises((ValueError, TypeError)):
        beam_search(random_model(0, 4), [[1]], **settings)


@pytest.mark.parametrize("prompts", [[1, 2], [[1.5]], [[True]]])
def test_bad_prompts_are_refused(random_model, prompts):
    with pytest.raises(TypeError):
        beam_search(random_model(0, 4), prompts, beam_width=1, max_new_tokens=1, eos_id=0)


@pytest.mark.parametrize(
    "answer", [np.zeros((2, 4)), np.zeros(4), np.full((1, 4), np.nan), np.full((1, 4), np.inf)]
)
def test_invalid_model_outputs_are_rejected(answer):
    model = SimpleNamespace(log_probs=lambda prefixes: answer)
    with pytest.raises(ValueError, match="log_probs"):
        beam_search(model, [[1]], beam_width=1, max_new_tokens=1, eos_id=0)
