"""Continuous batching: each request gets the answer that it gets alone."""

import random

import numpy as np
import pytest
import torch

from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.generate import generate, stream
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.errors import DTypeError, RangeError

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8], [1, 1, 2, 3, 5, 8, 13], [4] * 17]
WAYS = [
    Sampling(),
    Sampling(1.3, top_k=20, top_p=0.9, min_p=0.01, seed=5),
    Sampling(0.9, seed=6),
    Sampling(),
    Sampling(2.0, top_p=0.7, seed=7),
]


def by_hand(decoder, prompt, count):
    """Greedy without a cache: the whole text again for every token."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(decoder(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


def test_greedy_is_the_uncached_argmax(decoder):
    expected = [by_hand(decoder, prompt, 9) for prompt in PROMPTS]
    assert generate(decoder, PROMPTS, max_new_tokens=9) == expected


def test_rows_of_a_batch_are_independent(decoder):
    """A batch of ragged prompts gives each row what it gets alone, however many run at once."""
    alone = [
        generate(decoder, [prompt], max_new_tokens=9, sampling=way)[0]
        for prompt, way in zip(PROMPTS, WAYS, strict=True)
    ]
    for batch in (1, 2, 5):
        assert generate(decoder, PROMPTS, max_new_tokens=9, sampling=WAYS, batch=batch) == alone


def come_and_go(decoder, ahead):
    """16 requests of random lengths, stops and seeds, added at random times to a small pool."""
    draw = random.Random(3)
    engine = Engine(decoder, rows=3, pages=14, page_size=4)
    engine._most_ahead = ahead
    wanted, answers = {}, {}
    while len(wanted) < 16 or engine.is_busy:
        if len(wanted) < 16 and draw.random() < 0.5:
            prompt = [draw.randrange(23) for _ in range(draw.randint(1, 20))]
            options = {
                "max_new_tokens": draw.randint(1, 12),
                "stop_ids": draw.sample(range(23), 2),
                "sampling": draw.choice([None, Sampling(1.2, seed=draw.randrange(99))]),
            }
            wanted[engine.add(prompt, **options)] = (prompt, options)
        for token in engine.step():
            answers.setdefault(token.request, []).append(token.token)
    assert engine.pool.book.free_pages == 14
    for number, (prompt, options) in wanted.items():
        assert answers[number] == generate(decoder, [prompt], **options)[0]


def test_concurrent_requests_get_the_answers_they_get_alone(decoder):
    come_and_go(decoder, 1)


def test_running_ahead_changes_nothing(make):
    """As on a GPU."""
    come_and_go(make("llama"), 5)


def test_shared_prefixes_change_nothing(make):
    """The second prompt starts from the first one's pages."""
    decoder = make("llama")
    engine = Engine(decoder, rows=4, pages=32, page_size=4, share_prefixes=True)
    prefix = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    prompts = [[*prefix, last] for last in (1, 2)] + [prefix]
    answers = {}
    for prompt in prompts:
        number = engine.add(prompt, max_new_tokens=6)
        before = engine.pool.book.free_pages
        while engine.is_busy:
            for token in engine.step():
                answers.setdefault(number, []).append(token.token)
        assert engine.pool.book.free_pages == before
    assert list(answers.values()) == generate(decoder, prompts, max_new_tokens=6)
    sequence = engine.pool.open()
    sequence.adopt([*prefix, 3])
    assert sequence.length == 8  # two whole pages of four


def test_stop_tokens_end_a_row_and_are_included(make):
    decoder = make("llama")
    answer = generate(decoder, [[1, 2, 3]], max_new_tokens=8)[0]
    stop = answer[2]
    stopped = generate(decoder, [[1, 2, 3]], max_new_tokens=8, stop_ids=[stop])[0]
    assert stopped == answer[: answer.index(stop) + 1]
    tokens = list(stream(decoder, [[1, 2, 3]], max_new_tokens=8, stop_ids=[stop]))
    assert [token.last for token in tokens] == [False] * (len(stopped) - 1) + [True]


def test_stop_strings_end_a_row_wherever_they_lie(make):
    """Tokens 0 … 22 as two letters each, so that a stop string straddles three tokens."""
    decoder = make("llama")

    def decode(tokens):
        return "".join(f"{token:02}" for token in tokens)

    answer = generate(decoder, [[1, 2, 3]], max_new_tokens=10)[0]
    text = decode(answer)
    stop = text[5:9]
    at = text.index(stop)
    tokens = list(stream(decoder, [[1, 2, 3]], max_new_tokens=10, decode=decode, stop_texts=[stop]))
    assert "".join(token.text for token in tokens) == text[:at]
    assert len(tokens) == -(-(at + 4) // 2)
    assert [token.last for token in tokens] == [False] * (len(tokens) - 1) + [True]
    whole = list(stream(decoder, [[1, 2, 3]], max_new_tokens=10, decode=decode))
    assert "".join(token.text for token in whole) == text


def test_a_cancelled_request_frees_its_pages(make):
    decoder = make("llama")
    engine = Engine(decoder, rows=1, pages=4, page_size=8)
    first, second = (engine.add([1, 2], max_new_tokens=9) for _ in range(2))
    engine.step()
    engine.cancel(first)
    engine.cancel(99)
    said = [token.token for _ in range(9) for token in engine.step()]
    assert said == generate(decoder, [[1, 2]], max_new_tokens=9)[0]
    assert not engine.is_busy
    assert engine.pool.book.free_pages == 4
    assert second == 1


BAD = [
    (RangeError, {"prompts": [[1], []]}, "prompt 1: the prompt is empty"),
    (
        RangeError,
        {"prompts": [[1] * 60]},
        "60 and 8 new tokens need 68 positions, the model has 64",
    ),
    # Before memory is taken for them.
    (RangeError, {"prompts": [[1]], "max_new_tokens": 10**12}, "positions, the model has 64"),
    (RangeError, {"prompts": [[99]]}, "outside the vocabulary of 23"),
    (RangeError, {"prompts": [[-1]]}, "outside the vocabulary of 23"),
    (RangeError, {"prompts": [[1]], "stop_ids": [77]}, "stop token 77"),
    (RangeError, {"prompts": [[1]], "max_new_tokens": 0}, "at least 1"),
    (RangeError, {"prompts": [[1]], "batch": 0}, "at least 1"),
    (RangeError, {"prompts": [[1], [2]], "sampling": [Sampling()]}, "1 samplings for 2"),
    (DTypeError, {"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got float"),
    (DTypeError, {"batch": 2.5}, "batch must be an integer, got float"),
    (DTypeError, {"stop_ids": [1.5]}, "prompt 0: a stop token must be an integer"),
    (DTypeError, {"prompts": [[1], [1.5]]}, "prompt 1: a token of the prompt must be an integer"),
]


@pytest.mark.parametrize(("kind", "arguments", "sentence"), BAD)
def test_bad_input_is_refused_with_a_sentence(make, kind, arguments, sentence):
    with pytest.raises(kind, match=sentence):
        generate(make("llama"), **{"prompts": [[1]], "max_new_tokens": 8, **arguments})


def test_requests_that_can_never_run_are_refused(make):
    decoder = make("llama")
    engine = Engine(decoder, rows=2, pages=2, page_size=4)
    with pytest.raises(MemoryError, match="needs 3 pages, the pool has 2"):
        engine.add([1] * 5, max_new_tokens=5)
    with pytest.raises(RangeError, match="max_new_tokens"):
        engine.add([1], max_new_tokens=0)
    with pytest.raises(RangeError, match="stop_texts need decode"):
        engine.add([1], max_new_tokens=1, stop_texts=["x"])
    assert not engine.is_busy
    with pytest.raises(RangeError, match="at least one row"):
        Engine(decoder, rows=0)
    # A full pool makes others wait; it does not break what runs.
    for _ in range(3):
        engine.add([1] * 4, max_new_tokens=5)
    counts = []
    while engine.is_busy:
        counts.append(len(engine.step()))
    assert counts == [1] * 15


def test_nan_logits_fail_one_request_only(make):
    """Token 9 breaks the model; the other rows do not notice."""
    decoder = make("llama")
    decoder.embedding.weight[9] = float("nan")
    engine = Engine(decoder, rows=3, pages=32)
    good = engine.add([1, 2, 3], max_new_tokens=5)
    bad = engine.add([1, 9], max_new_tokens=5)
    with pytest.raises(RangeError, match=f"request {bad} are NaN"):
        engine.step()
    said = []
    while engine.is_busy:
        said += engine.step()
    assert [token.request for token in said] == [good] * 5
    assert [t.token for t in said] == generate(decoder, [[1, 2, 3]], max_new_tokens=5)[0]
    assert engine.pool.book.free_pages == 32


BITS = [None, 8, 4, "fp8"]


@pytest.fixture
def answers(to_the_end):
    def run(decoder, prompts, **options):
        engine = Engine(decoder, rows=3, pages=24, page_size=4, **options)
        for prompt in prompts:
            engine.add(prompt, max_new_tokens=6)
        return to_the_end(engine)

    return run


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_a_nan_prompt_fails_one_request_only(make, bits, share, answers):
    """Whatever pages hold."""
    decoder = make("llama")
    prompts = [[1, 2, 3], [1, 9, 3, 4, 5], [4, 5], [6]]
    expected, _ = answers(decoder, prompts, bits=bits, share_prefixes=share)
    decoder.embedding.weight[9] = float("nan")
    said, sentences = answers(decoder, prompts, bits=bits, share_prefixes=share)
    assert said == {number: expected[number] for number in (0, 2, 3)}
    assert sentences == ["the logits of request 1 are NaN or have no softmax"]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_a_nan_token_fails_only_requests_that_choose_it(make, bits, share, answers):
    decoder = make("llama")
    prompts = [[1, 2, 3], [8, 4, 11], [4, 5]]
    expected, _ = answers(decoder, prompts, bits=bits, share_prefixes=share)
    broken = expected[0][1]
    for tokens in expected.values():
        if broken in tokens[:-1]:
            del tokens[tokens.index(broken) + 1 :]
    lengths = [len(tokens) for tokens in expected.values()]
    assert lengths[0] == 2
    assert max(lengths) == 6
    decoder.embedding.weight[broken] = float("nan")
    said, sentences = answers(decoder, prompts, bits=bits, share_prefixes=share)
    assert said == expected
    assert len(sentences) == sum(length < 6 for length in lengths)


def test_each_failing_request_raises_its_own_error(make, answers):
    decoder = make("llama")
    prompts = [[1, 9], [1, 2, 3], [9]]
    expected, _ = answers(decoder, prompts)
    decoder.embedding.weight[9] = float("nan")
    said, sentences = answers(decoder, prompts)
    assert said == {1: expected[1]}
    assert [sentence.partition(" are NaN")[0] for sentence in sentences] == [
        "the logits of request 0",
        "the logits of request 2",
    ]


def test_a_failing_decode_fails_one_request_only(make, answers, to_the_end):
    decoder = make("llama")
    expected, _ = answers(decoder, [[1, 2], [3], [4, 5]])
    unknown = expected[1][1]
    assert unknown != expected[1][0]

    def decode(tokens):
        if unknown in tokens:
            raise KeyError(unknown)
        return "x" * len(tokens)

    engine = Engine(decoder, rows=3, pages=24, page_size=4)
    engine.add([1, 2], max_new_tokens=6)
    engine.add([3], max_new_tokens=6, decode=decode)
    engine.add([4, 5], max_new_tokens=6)
    said, sentences = to_the_end(engine)
    assert said == {**expected, 1: expected[1][:1]}
    assert sentences == [f"decoding the text of request 1: KeyError({unknown})"]


def test_a_cancelled_request_returns_no_more_tokens(make):
    """Not of what it had said when another broke, and not that it broke itself."""
    decoder = make("llama")
    decoder.embedding.weight[9] = float("nan")
    engine = Engine(decoder, rows=3, pages=24, page_size=4)
    good, first, second = (engine.add(prompt, max_new_tokens=4) for prompt in ([1], [9], [2, 9]))
    with pytest.raises(RangeError, match=f"request {first} "):
        engine.step()
    engine.cancel(second)
    engine.cancel(good)
    assert not engine.is_busy
    assert engine.step() == []


@pytest.mark.parametrize("bits", BITS)
def test_pages_of_a_nan_prompt_are_not_shared(make, bits, answers, to_the_end):
    """The page of 1 … 4 is whole, but computed beside NaN."""
    decoder = make("llama")
    decoder.embedding.weight[9] = float("nan")
    engine = Engine(decoder, rows=2, pages=24, page_size=4, bits=bits, share_prefixes=True)
    engine.add([1, 2, 3, 4, 9, 5], max_new_tokens=6)
    _, sentences = to_the_end(engine)
    assert len(sentences) == 1
    late = engine.add([1, 2, 3, 4, 6], max_new_tokens=6)
    expected, _ = answers(decoder, [[1, 2, 3, 4, 6]], bits=bits)
    assert to_the_end(engine) == ({late: expected[0]}, [])


class Failing:
    """Calls what it stands for, except the first time."""

    def __init__(self, work):
        self.work, self.calls = work, 0

    def __call__(self, *given):
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("no memory")
        return self.work(*given)


@pytest.mark.parametrize("ahead", [1, 5])
@pytest.mark.parametrize("failing", ["prefill", "decoding"])
def test_a_failing_step_loses_nothing(make, failing, ahead, to_the_end):
    """One request runs, two are about to enter, in their order."""
    decoder = make("llama")
    engine = Engine(decoder, rows=3, pages=24, page_size=4)
    engine._most_ahead = ahead
    engine.add(PROMPTS[0], max_new_tokens=6)
    said = {0: [token.token for token in engine.step()]}
    before = engine.pool.book.free_pages
    for prompt in PROMPTS[1:3]:
        engine.add(prompt, max_new_tokens=6)
    if failing == "prefill":
        decoder.step = Failing(decoder.step)
    else:
        engine._step.choose_ahead = Failing(engine._step.choose_ahead)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    assert engine.pool.book.free_pages == before
    rest, sentences = to_the_end(engine)
    rest[0] = said[0] + rest[0]
    assert not sentences
    assert list(rest) == [0, 1, 2]
    assert rest == dict(enumerate(generate(make("llama"), PROMPTS[:3], max_new_tokens=6)))


NO_INTEGERS = [
    ({"prompt": [1.7, 2]}, "a token of the prompt must be an integer, got float"),
    ({"prompt": torch.tensor([1.7, 2.0])}, "a token of the prompt must be an integer, got Tensor"),
    ({"prompt": torch.tensor([[1, 2]])}, "a token of the prompt must be an integer, got Tensor"),
    ({"prompt": ["a"]}, "a token of the prompt must be an integer, got str"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got float"),
    ({"max_new_tokens": "2"}, "max_new_tokens must be an integer, got str"),
    ({"stop_ids": [1.5]}, "a stop token must be an integer, got float"),
    ({"stop_ids": ["x"]}, "a stop token must be an integer, got str"),
    ({"stop_ids": 5}, "a stop token: expected a list of integers, got 5"),
    ({"prompt": 5}, "a token of the prompt: expected a list of integers, got 5"),
    ({"sampling": 0.5}, "sampling must be a Sampling, got 0.5"),
    ({"decode": str, "stop_texts": [5]}, r"stop must be a text or a list of texts, got \[5\]"),
]


@pytest.mark.parametrize("changes", [{"rows": 1.5}, {"rows": "2"}, {"pages": 2.5}])
def test_an_engine_needs_whole_numbers_and_a_decoder(make, changes):
    with pytest.raises(DTypeError, match="must be an integer"):
        Engine(make("llama"), **changes)
    with pytest.raises(DTypeError, match="an engine needs a Decoder, got int"):
        Engine(5)


@pytest.mark.parametrize(("changes", "sentence"), NO_INTEGERS)
def test_non_integers_are_refused_when_added(make, changes, sentence):
    engine = Engine(make("llama"), rows=2, pages=8, page_size=4)
    with pytest.raises(DTypeError, match=sentence):
        engine.add(**{"prompt": [1, 2], "max_new_tokens": 3, **changes})
    assert not engine.is_busy


@pytest.mark.parametrize("made", [np.array, torch.tensor, tuple, lambda x: list(torch.tensor(x))])
def test_integers_of_any_library_are_accepted(make, made, to_the_end):
    engine = Engine(make("llama"), rows=2, pages=8, page_size=4)
    engine.add(made([1, 2, 3]), max_new_tokens=np.int64(4), stop_ids=made([22]))
    engine.add([1, 2, 3], max_new_tokens=4, stop_ids=[22])
    said, _ = to_the_end(engine)
    assert said[0] == said[1]
