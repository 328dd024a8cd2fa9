"""`Decoder.generate`: text and ids, streams, stop strings, beams and speculation by one call."""

import numpy as np
import pytest
import torch

from trapline.gold import Beams, Sampling
from trapline.gold.decoder import beams
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.speculator import Burst
from trapline.gold.errors import DTypeError, RangeError

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8]]


class TwoDigits:
    """Token 7 is "07": stop strings lie across tokens."""

    def encode(self, text):
        return [int(text[at : at + 2]) for at in range(0, len(text), 2)]

    def decode(self, tokens):
        return "".join(f"{token:02}" for token in tokens)


class Oracle:
    """A speculator that drafts what plain decoding says, in bursts of three."""

    def __init__(self):
        self.asked = []

    def stream(self, decoder, prompts, *, max_new_tokens, stop_ids, sampling, batch, finished):
        self.asked.append((stop_ids, sampling, batch))
        answers = generate(
            decoder,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            sampling=sampling,
        )
        for number, answer in enumerate(answers):
            for at in range(0, len(answer), 3):
                part = answer[at : at + 3]
                yield Burst(number, part, len(part) - 1, last=at + 3 >= len(answer))
                if finished(number):
                    break


@pytest.fixture
def talker(make):
    decoder = make("llama")
    decoder.tokenizer = TwoDigits()
    return decoder


@pytest.fixture
def nan_for_22(make):
    """A decoder whose logits are NaN after any prompt with token 22."""
    decoder = make("llama")
    with torch.no_grad():
        decoder.embedding.weight[22] = float("nan")
    return decoder


def test_ids_and_text_give_the_same_answers(talker):
    expected = generate(talker, PROMPTS, max_new_tokens=6)
    texts = [talker.tokenizer.decode(prompt) for prompt in PROMPTS]
    for prompts in (PROMPTS, texts, [np.array(one) for one in PROMPTS], [texts[0], *PROMPTS[1:]]):
        found = talker.generate(prompts, max_new_tokens=6)
        assert [answer.tokens for answer in found] == expected
        assert [answer.text for answer in found] == [talker.tokenizer.decode(e) for e in expected]
        assert {answer.finish_reason for answer in found} == {"length"}
    for one in (PROMPTS[0], texts[0]):
        assert [answer.tokens for answer in talker.generate(one, max_new_tokens=6)] == expected[:1]
    assert talker.generate([], max_new_tokens=6) == []


def test_without_a_tokenizer_answers_have_tokens_only(make):
    decoder = make("llama")
    (answer,) = decoder.generate([1, 2], max_new_tokens=3)
    assert answer.text is None
    assert [piece.text for piece in decoder.generate([1, 2], max_new_tokens=3, stream=True)] == [
        ""
    ] * 3
    with pytest.raises(RangeError, match="text needs a tokenizer"):
        decoder.generate("hello", max_new_tokens=3)
    with pytest.raises(RangeError, match="stop strings need a tokenizer"):
        decoder.generate([1], max_new_tokens=3, stop="x")


@pytest.mark.parametrize("speculate", [None, Oracle()])
def test_stop_ids_end_answers_and_default_to_the_checkpoints(talker, speculate):
    options = {"max_new_tokens": 8, "speculate": speculate}
    whole = talker.generate([1, 2, 3], **options)[0]
    end = whole.tokens[2]
    cut = whole.tokens[: whole.tokens.index(end) + 1]
    talker.stop_ids = [end]
    for chosen in (None, [end]):
        (answer,) = talker.generate([1, 2, 3], stop_ids=chosen, **options)
        assert (answer.tokens, answer.finish_reason) == (cut, "stop")
    assert talker.generate([1, 2, 3], stop_ids=[], **options)[0] == whole


@pytest.mark.parametrize("speculate", [None, Oracle()])
def test_stop_strings_end_answers_wherever_they_lie(talker, speculate):
    whole = talker.generate(PROMPTS, max_new_tokens=9)
    stop = whole[0].text[5:9]
    options = {"max_new_tokens": 9, "stop": stop, "speculate": speculate}
    found = talker.generate(PROMPTS, **options)
    for answer, full in zip(found, whole, strict=True):
        assert answer.text == full.text.partition(stop)[0]
        assert answer.finish_reason == ("stop" if stop in full.text else "length")
        assert answer.tokens == full.tokens[: len(answer.tokens)]
    pieces = list(talker.generate(PROMPTS, stream=True, **options))
    for number, answer in enumerate(found):
        own = [piece for piece in pieces if piece.prompt == number]
        assert "".join(piece.text for piece in own) == answer.text
        assert [piece.token for piece in own] == answer.tokens
        assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == answer.finish_reason


def test_a_stream_says_which_tokens_were_drafted(talker):
    pieces = list(talker.generate([2], max_new_tokens=6, speculate=Oracle(), stream=True))
    assert [piece.drafted for piece in pieces] == [True, True, False] * 2


def test_speculation_receives_what_was_asked(talker):
    oracle = Oracle()
    talker.generate(
        PROMPTS, max_new_tokens=2, speculate=oracle, sampling=Sampling(1.0), batch=2, stop_ids=[4]
    )
    ((stops, settings, batch),) = oracle.asked
    assert (list(stops), batch) == ([4], 2)
    assert [one.seed for one in settings] == [0, 1, 2]


@pytest.mark.parametrize("door", ["function", "method"])
def test_equal_prompts_draw_different_answers(make, door):
    """Prompt i draws with seed + i, and what it draws does not depend on the batch."""
    decoder, drawn = make("llama"), Sampling(1.5, seed=3)

    def answers(prompts, sampling):
        if door == "function":
            return generate(decoder, prompts, max_new_tokens=8, sampling=sampling)
        found = decoder.generate(prompts, max_new_tokens=8, sampling=sampling)
        return [answer.tokens for answer in found]

    four = answers([[1, 2]] * 4, drawn)
    assert len({tuple(one) for one in four}) == 4
    alone = [answers([[1, 2]], Sampling(1.5, seed=3 + i))[0] for i in range(4)]
    assert four == alone
    assert answers([[1, 2]] * 2, [drawn, drawn]) == [four[0]] * 2


def test_one_broken_prompt_keeps_the_other_answers(nan_for_22):
    expected = generate(nan_for_22, [[1, 2], [3]], max_new_tokens=5)
    found = nan_for_22.generate([[1, 2], [22], [3]], max_new_tokens=5)
    assert [found[0].tokens, found[2].tokens] == expected
    assert (found[1].finish_reason, found[1].tokens) == ("error", [])
    assert "NaN" in found[1].error
    pieces = list(nan_for_22.generate([[22], [3]], max_new_tokens=5, stream=True))
    (broken,) = [piece for piece in pieces if piece.prompt == 0]
    assert (broken.token, broken.finish_reason) == (None, "error")
    assert [piece.token for piece in pieces if piece.prompt == 1] == expected[1]


def test_one_broken_prompt_keeps_the_beams_of_the_others(nan_for_22):
    found = nan_for_22.generate([[1, 2], [22], [3]], max_new_tokens=1, beams=2, stop_ids=[4])
    assert [answer.finish_reason == "error" for answer in found] == [False, True, False]


def test_beams_are_those_of_the_search(talker):
    options = {"length_penalty": 0.5, "policy": "hf"}
    expected = beams.search(
        talker, PROMPTS, beam_width=3, max_new_tokens=6, eos_id=[4, 11], **options
    )
    found = talker.generate(
        PROMPTS, max_new_tokens=6, beams=Beams(3, **options), stop_ids=[4, 11], batch=2
    )
    for answer, own in zip(found, expected, strict=True):
        assert [beam.tokens for beam in answer.beams] == [list(beam.tokens) for beam in own]
        assert [beam.score for beam in answer.beams] == pytest.approx([b.score for b in own])
        assert [beam.finish_reason == "stop" for beam in answer.beams] == [b.ended for b in own]
        assert (answer.tokens, answer.text) == answer.beams[0][:2]
    (plain,) = talker.generate([1], max_new_tokens=4, beams=2, stop_ids=[4])
    assert len(plain.beams) == 2


REFUSED = [
    ({"beams": 2, "sampling": Sampling(1.0)}, RangeError, "does not sample"),
    ({"beams": 2, "speculate": Oracle()}, RangeError, "cannot speculate"),
    ({"beams": 2, "stop": "a"}, RangeError, "not at stop strings"),
    ({"beams": 2, "stream": True}, RangeError, "leave out stream"),
    ({"beams": 2, "n": 2}, RangeError, r"by Beams\(width, n_best=n\): leave out n"),
    ({"beams": 2, "logprobs": 1}, RangeError, "scores, not logprobs"),
    ({"beams": 2}, RangeError, "needs stop_ids"),
    ({"speculate": Oracle(), "logprobs": 1}, RangeError, "speculation has no logprobs"),
    ({"n": 2}, RangeError, "n=2 answers need sampling"),
    ({"n": 0}, RangeError, "n must be at least 1"),
    ({"logprobs": 24}, RangeError, "prompt 0: logprobs must be between 0 and 23, got 24"),
    ({"logprobs": True}, DTypeError, "logprobs must be an integer, got bool"),
    ({"sampling": Sampling(logit_bias={23: 1.0})}, RangeError, "logit_bias token 23 is outside"),
    ({"prompts": [{"role": "user", "content": "a"}]}, RangeError, "the checkpoint's own tokenizer"),
    ({"prompts": {"role": "user"}}, DTypeError, "text, chat messages or token ids, got dict"),
    ({"speculate": "lookup"}, DTypeError, "speculate must be a Speculation, got 'lookup'"),
    ({"stop": [""]}, RangeError, "cannot be empty"),
    ({"max_new_tokens": 0}, RangeError, "at least 1"),
    ({"batch": 0}, RangeError, "at least 1"),
    ({"max_new_tokens": 64}, RangeError, "prompt 0: .* the model has 64"),
    ({"stop_ids": [99]}, RangeError, "stop token 99"),
    ({"prompts": 5}, DTypeError, "text, chat messages or token ids, got int"),
    ({"prompts": [[1], 5]}, DTypeError, "a list of token ids, got 5"),
    ({"prompts": [[1], []]}, RangeError, "prompt 1: the prompt is empty"),
    ({"prompts": [[99]]}, RangeError, "outside the vocabulary of 23"),
    ({"sampling": [Sampling()] * 2}, RangeError, "2 samplings for 1 prompts"),
    ({"sampling": [0.7]}, DTypeError, "a Sampling or a list of them, got 0.7"),
    ({"stop": None}, DTypeError, "stop must be a text or a list of texts, got None"),
    ({"stop": [3]}, DTypeError, r"stop must be a text or a list of texts, got \[3\]"),
    ({"stop": b"x"}, DTypeError, "stop must be a text or a list of texts, got b'x'"),
    ({"stop_ids": 5}, DTypeError, "a stop token: expected a list of integers, got 5"),
    ({"prompts": torch.tensor(5)}, DTypeError, "text, chat messages or token ids, got int"),
    ({"prompts": np.array([1.5])}, DTypeError, "a token of the prompt must be an integer"),
    (
        {"beams": Beams(2, length_penalty="x"), "stop_ids": [4]},
        DTypeError,
        "length_penalty must be a number, got 'x'",
    ),
]


@pytest.mark.parametrize(("change", "kind", "sentence"), REFUSED)
def test_what_does_not_compose_is_refused_in_a_sentence(talker, change, kind, sentence):
    options = {"prompts": [[1, 2]], "max_new_tokens": 3, **change}
    with pytest.raises(kind, match=sentence):
        talker.generate(**options)


@pytest.mark.parametrize("made", [torch.tensor, np.array, lambda ids: list(torch.tensor(ids))])
def test_one_prompt_may_be_an_array(talker, made):
    wanted = talker.generate([1, 2, 3], max_new_tokens=4)
    assert talker.generate(made([1, 2, 3]), max_new_tokens=4) == wanted
    assert talker.generate([made([1, 2, 3])], max_new_tokens=4) == wanted


def test_the_function_asks_for_lists_of_ids(make):
    with pytest.raises(DTypeError, match=r"got 5; write one prompt as \[\[5, 6\]\]"):
        generate(make("llama"), [5, 6], max_new_tokens=2)
    with pytest.raises(DTypeError, match=r"temperature must be one number, got \[0.5, 1.0\]"):
        Sampling([0.5, 1.0])


def test_a_loaded_checkpoint_speaks_with_its_own_tokenizer_and_ends(make, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(23)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    make("llama", eos_token_id=[4, 5]).save_pretrained(tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    decoder = Decoder.from_pretrained(tmp_path)
    assert decoder.stop_ids == [4, 5]
    answer = decoder.generate("w1 w2", max_new_tokens=5)[0]
    (expected,) = generate(decoder, [[1, 2]], max_new_tokens=5, stop_ids=[4, 5])
    assert (answer.tokens, answer.text) == (expected, made.decode(expected))


def test_a_new_decoder_ends_where_its_configuration_says(make):
    assert make("llama", eos_token_id=7).stop_ids == [7]
    assert make("llama", eos_token_id=None).stop_ids == []
    with pytest.raises(RangeError, match="eos_token_id must be an integer"):
        make("llama", eos_token_id="end")
