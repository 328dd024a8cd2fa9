"""The `vllm` policy: cases worked out by hand, and a slow oracle written from its description.

Each step looks at the 2W likeliest tokens of every beam; an end among them completes its beam, the
W best others live on; nothing stops before the maximum length; the length penalty counts the
prompt and leaves the end out.
"""

import numpy as np
import pytest

from trapline.gold import beam_search


def slow(law, prompt, width, longest, eos, penalty):
    """(tokens, score) of the W best, with lists and sorts only."""

    def rate(entry):
        tokens, total = entry
        length = len(prompt) + len(tokens) - (tokens[-1] == eos)
        return total / length**penalty

    live, completed = [((), 0.0)], []
    for _ in range(longest):
        grown = []
        for tokens, total in live:
            row = law((*prompt, *tokens))
            likeliest = sorted(range(len(row)), key=lambda t: (-row[t], t))[: 2 * width]
            for token in likeliest:
                if row[token] > -np.inf:
                    where = completed if token == eos else grown
                    where.append(((*tokens, token), total + row[token]))
        live = sorted(grown, key=rate, reverse=True)[:width]
    best = sorted(completed + live, key=rate, reverse=True)[:width]
    return [(entry[0], rate(entry)) for entry in best]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
def test_search_equals_the_slow_oracle(random_model, penalty):
    for seed in range(25):
        rng = np.random.default_rng([seed, 5])
        vocabulary, width, longest = (int(rng.integers(a, b)) for a, b in ((4, 9), (1, 4), (1, 6)))
        eos = int(rng.integers(vocabulary))
        model = random_model(seed, vocabulary)
        prompts = [(1,), (0, 1, 2)]
        got = beam_search(
            model, prompts, beam_width=width, max_new_tokens=longest, eos_id=eos,
            length_penalty=penalty, policy="vllm",
        )  # fmt: skip
        for prompt, found in zip(prompts, got, strict=True):
            want = slow(model.law, prompt, width, longest, eos, penalty)
            assert [beam.tokens for beam in found] == [tokens for tokens, _ in want]
            np.testing.assert_allclose([b.score for b in found], [s for _, s in want], rtol=1e-12)


#: Ending at once costs 2; two steps to the end cost 3.
SHORT_OR_LONG = {(): {0: -2.0, 1: -2.5}, (1,): {0: -0.5}}


def test_the_prompt_counts_in_the_length(table_model):
    """1 + 1 − 1 = 1 and 1 + 2 − 1 = 2 positions: −2/1 and −3/2."""
    (found,) = beam_search(
        table_model(SHORT_OR_LONG), [[9]], beam_width=2, max_new_tokens=3, eos_id=0, policy="vllm"
    )
    assert [(beam.tokens, beam.score) for beam in found] == [((1, 0), -1.5), ((0,), -2.0)]


def test_long_prompt_weakens_the_penalty(table_model):
    """After 100 more tokens the same two are −2/101 and −3/102: the order turns."""
    entries = {(9,) * 100 + key: value for key, value in SHORT_OR_LONG.items()}
    settings = {"beam_width": 2, "max_new_tokens": 3, "eos_id": 0}
    (found,) = beam_search(table_model(entries), [[9] * 101], policy="vllm", **settings)
    assert [beam.tokens for beam in found] == [(0,), (1, 0)]
    (found,) = beam_search(table_model(entries), [[9] * 101], **settings)
    assert [beam.tokens for beam in found] == [(1, 0), (0,)]


def test_an_end_below_the_likeliest_of_its_beam_is_not_seen(table_model):
    """With one beam two tokens are looked at; the end is third."""
    entries = {(): {1: -1.0, 2: -1.5, 0: -2.0}, (1,): {1: -9.0}}
    settings = {"beam_width": 1, "max_new_tokens": 2, "eos_id": 0, "length_penalty": 0.0}
    ((seen,),) = beam_search(table_model(entries), [[9]], policy="vllm", **settings)
    assert (seen.tokens, seen.ended) == ((1, 1), False)
    ((canonical,),) = beam_search(table_model(entries), [[9]], **settings)
    assert canonical.tokens == (0,)


def test_an_empty_prompt_has_no_length(random_model):
    with pytest.raises(ValueError, match="a prompt must not be empty"):
        beam_search(
            random_model(0, 4), [[]], beam_width=1, max_new_tokens=2, eos_id=0, policy="vllm"
        )
