"""Greedy speculation says what plain decoding says, whoever drafts; limits, stops, bad input."""

import numpy as np
import pytest
import torch

from trapline.gold.decoder.sampling import Sampling, TokenSampler
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.tree_decoding.generate import generate, stream

VOCAB = 9


def table_target(tables, seed=0):
    rng = np.random.default_rng(seed)
    # Quarters: ties happen, and go to the lower token on both sides.
    return tables.Target(rng.integers(0, 40, (tables.size, VOCAB)) / 4.0)


def make_drafter(tables, name, target):
    kind = tables.drafters[name]
    return kind(target) if name in ("right", "wrong") else kind(target.vocab)


def random_prompts(count, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist() for _ in range(count)]


def equal_to_plain(tables, name, mode, count, seed):
    target = table_target(tables, seed)
    prompts = random_prompts(count, seed)
    done = generate(
        target,
        make_drafter(tables, name, target),
        prompts,
        max_new_tokens=12,
        stop_ids=[3],
        mode=mode,
        budget=7,
        batch=250,
    )
    assert done.tokens == [target.greedy(prompt, 12, [3]) for prompt in prompts]
    return done.statistics


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("name", ["right", "wrong", "random", "repeating"])
def test_500_prompts_have_the_ids_of_plain_decoding(tables, name, mode):
    statistics = equal_to_plain(tables, name, mode, 500, 1)
    assert 1.0 <= statistics.tau <= tables.Drafter.depth + 1
    if name == "wrong":
        assert statistics.tau == 1.0
    if name == "right":
        assert statistics.acceptance_by_depth() == [1.0] * tables.Drafter.depth


@pytest.mark.full
@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("name", ["right", "wrong", "random", "repeating"])
def test_10_000_prompts_have_the_ids_of_plain_decoding(tables, name, mode):
    equal_to_plain(tables, name, mode, 10_000, 2)


def test_perfect_drafter_needs_the_fewest_passes(tables):
    target = table_target(tables)
    drafter = make_drafter(tables, "right", target)
    done = generate(target, drafter, [[1, 2]], max_new_tokens=13, mode="chain", budget=5)
    # 6 + 6 + 1: two whole blocks with their bonus, and what is left.
    assert (done.statistics.passes, done.statistics.tokens, done.statistics.drafted) == (3, 13, 10)


@pytest.mark.parametrize("most", range(1, 9))
def test_no_answer_is_longer_than_allowed(tables, most):
    target = table_target(tables)
    drafter = make_drafter(tables, "right", target)
    done = generate(target, drafter, [[4]], max_new_tokens=most, budget=5)
    assert done.tokens == [target.greedy([4], most)]
    assert done.statistics.drafted <= most


def test_a_stop_token_inside_a_block_ends_the_answer_there(tables):
    target = table_target(tables)
    drafter = make_drafter(tables, "right", target)
    whole = target.greedy([5], 8)
    stop = whole[2]
    first = whole.index(stop)
    bursts = list(stream(target, drafter, [[5]], max_new_tokens=8, stop_ids=[stop], budget=5))
    assert [token for burst in bursts for token in burst.tokens] == whole[: first + 1]
    assert [burst.last for burst in bursts] == [False] * (len(bursts) - 1) + [True]


def test_waiting_rows_answer_as_if_alone(tables):
    target = table_target(tables, 4)
    drafter = make_drafter(tables, "random", target)
    prompts = random_prompts(7, 5)
    together = generate(target, drafter, prompts, max_new_tokens=9, budget=4, batch=3)
    alone = [generate(target, drafter, [p], max_new_tokens=9, budget=4).tokens[0] for p in prompts]
    assert together.tokens == alone


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_penalties_use_the_history_of_each_node(tables, mode):
    """Against a loop that knows nothing of trees: the penalty of the text so far."""
    target = table_target(tables, 6)
    way = Sampling(
        repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, logit_bias={2: -0.3}
    )
    prompts = random_prompts(40, 7)
    done = generate(
        target,
        make_drafter(tables, "right", target),
        prompts,
        max_new_tokens=15,
        sampling=way,
        mode=mode,
        budget=9,
    )
    for prompt, answer in zip(prompts, done.tokens, strict=True):
        text = list(prompt)
        for token in answer:
            logits = target.table[tables.state_of(text)].float()
            logits[2] -= 0.3
            for seen in set(text):
                logits[seen] = logits[seen] / 1.3 if logits[seen] > 0 else logits[seen] * 1.3
            for said in set(text[len(prompt) :]):
                logits[said] -= 0.7 + 0.4 * text[len(prompt) :].count(said)
            assert token == int(logits.argmax())
            text.append(token)
    plain = generate(target, make_drafter(tables, "right", target), prompts, max_new_tokens=15)
    assert plain.tokens != done.tokens


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("name", ["right", "random"])
def test_seed_determines_the_text_for_any_drafter(tables, name, mode):
    target = table_target(tables, 8)
    prompts = random_prompts(30, 9)
    ways = [Sampling(temperature=1.2, top_p=0.9, seed=number) for number in range(30)]
    alone = [sampled_alone(tables, target, *one) for one in zip(prompts, ways, strict=True)]
    drafter = make_drafter(tables, name, target)
    done = generate(
        target, drafter, prompts, max_new_tokens=10, sampling=ways, mode=mode, budget=12
    )
    assert done.tokens == alone
    assert done.statistics.tau > 1.05


def sampled_alone(tables, target, prompt, way, most=10):
    """Plain sampling by the decoder's own chooser, one token after the other."""
    choose = TokenSampler([way], VOCAB, torch.device("cpu"))
    made = []
    while len(made) < most:
        logits = target.table[tables.state_of([*prompt, *made])]
        made.append(int(choose(logits[None], torch.tensor([len(made)]))))
    return made


def test_bad_input_is_refused_by_name(tables):
    target = table_target(tables)
    drafter = make_drafter(tables, "random", target)

    def run(prompts=((1,),), drafter=drafter, **options):
        return generate(target, drafter, prompts, **{"max_new_tokens": 4, **options})

    with pytest.raises(RangeError, match="budget"):
        run(budget=0)
    with pytest.raises(RangeError, match="max_new_tokens"):
        run(max_new_tokens=0)
    with pytest.raises(RangeError, match="mode"):
        run(mode="bush")
    with pytest.raises(RangeError, match="prompt 1 is empty"):
        run(prompts=[[1], []])
    with pytest.raises(RangeError, match="outside the vocabulary"):
        run(prompts=[[1, VOCAB]])
    with pytest.raises(RangeError, match="stop token"):
        run(stop_ids=[VOCAB])
    with pytest.raises(RangeError, match="positions"):
        run(max_new_tokens=target.context)
    with pytest.raises(ShapeError, match="vocabulary of 4 is not the target's 9"):
        run(drafter=tables.drafters["random"](4))
    with pytest.raises(RangeError, match="samplings"):
        run(sampling=[Sampling(), Sampling()])


def test_nan_logits_are_refused(tables):
    table = np.zeros((tables.size, 3))
    table[:, 1] = np.nan
    target = tables.Target(table)
    with pytest.raises(RangeError, match="NaN"):
        generate(target, tables.drafters["random"](3), [[1]], max_new_tokens=2)
