"""Logit bias, penalties, several answers and log-probabilities in every way to generate."""

from dataclasses import replace

import pytest
import torch
import transformers

from trapline.gold import Beams, Engine, Sampling, Speculation
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.engine import RequestError
from trapline.gold.decoder.penalties import BatchPenalties, History
from trapline.gold.decoder.sampling import TokenSampler
from trapline.gold.errors import DTypeError, RangeError

PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 8, 8]]
WAY = Sampling(
    repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4, logit_bias={4: 1.5, 9: -2}
)


def expected_logits(logits, way, prompt, answer):
    """One rule after the other, token by token, in float64."""
    logits = logits.double().clone()
    for token, value in (way.logit_bias or {}).items():
        logits[token] += value
    for token in {*prompt, *answer}:
        scale = way.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
    for token in set(answer):
        logits[token] -= way.presence_penalty + way.frequency_penalty * answer.count(token)
    return logits


def test_penalties_do_not_depend_on_the_default_dtype():
    logits = torch.linspace(-3.0, 3.0, 23)[None]
    history, device = History([3, 1], [4, 22]), torch.device("cpu")
    wanted = BatchPenalties([WAY], [history], 23, device)(logits)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = BatchPenalties([WAY], [history], 23, device)(logits)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


def greedy_without_cache(decoder, prompt, way, steps):
    answer = []
    while len(answer) < steps:
        logits = decoder(torch.tensor([[*prompt, *answer]]))[0, -1]
        answer.append(int(expected_logits(logits, way, prompt, answer).argmax()))
    return answer


def test_engine_penalties_follow_the_rules(decoder):
    ways = [WAY, Sampling(), Sampling(frequency_penalty=1.2)]
    engine = Engine(decoder, rows=2, pages=16)
    for prompt, way in zip(PROMPTS, ways, strict=True):
        engine.add(prompt, max_new_tokens=12, sampling=way)
    said = {0: [], 1: [], 2: []}
    while engine.is_busy:
        for token in engine.step():
            said[token.request].append(token.token)
    plain = decoder.generate(PROMPTS, max_new_tokens=12)
    for number, (prompt, way) in enumerate(zip(PROMPTS, ways, strict=True)):
        assert said[number] == greedy_without_cache(decoder, prompt, way, 12)
    assert said[1] == plain[1].tokens
    assert said[0] != plain[0].tokens


def test_running_ahead_counts_the_tokens_of_unread_steps(make):
    decoder = make("llama")
    engine = Engine(decoder, rows=2, pages=16)
    engine._most_ahead = 5  # as on a GPU
    for prompt in PROMPTS:
        engine.add(prompt, max_new_tokens=12, sampling=WAY)
    said = {0: [], 1: [], 2: []}
    while engine.is_busy:
        for token in engine.step():
            said[token.request].append(token.token)
    for number, prompt in enumerate(PROMPTS):
        assert said[number] == greedy_without_cache(decoder, prompt, WAY, 12)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_with_penalties_gives_the_same_answers(make, temperature):
    decoder = make("llama")
    way = Sampling(
        temperature, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={6: 1.0}, seed=3
    )
    plain = decoder.generate(PROMPTS, max_new_tokens=20, sampling=way)
    drafted = decoder.generate(
        PROMPTS, max_new_tokens=20, sampling=way, speculate=Speculation("lookup", budget=6)
    )
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]


def test_beams_with_bias_and_penalties_search_the_changed_distribution(make):
    """Without an end, width 1 is greedy; scores are sums of the changed log-probabilities."""
    decoder = make("llama")
    way = replace(WAY, logit_bias={**WAY.logit_bias, 0: float("-inf")})
    greedy = decoder.generate(PROMPTS, max_new_tokens=6, sampling=way)
    for width in (1, 3):
        found = decoder.generate(
            PROMPTS, max_new_tokens=6, sampling=way, beams=Beams(width, 0.0), stop_ids=[0]
        )
        for prompt, answer, alone in zip(PROMPTS, found, greedy, strict=True):
            if width == 1:
                assert answer.tokens == alone.tokens
            for beam in answer.beams:
                score = 0.0
                for place, token in enumerate(beam.tokens):
                    before = beam.tokens[:place]
                    logits = decoder(torch.tensor([[*prompt, *before]]))[0, -1]
                    changed = expected_logits(logits, way, prompt, before)
                    score += float(changed.log_softmax(0)[token])
                assert beam.score == pytest.approx(score, abs=1e-4)
    one, other = Sampling(logit_bias={4: 9.0}), Sampling()
    apart = decoder.generate(
        PROMPTS[:2], max_new_tokens=4, sampling=[one, other], beams=2, stop_ids=[0]
    )
    alone = decoder.generate(PROMPTS[1:2], max_new_tokens=4, beams=2, stop_ids=[0])
    assert 4 in apart[0].tokens
    assert apart[1].tokens == alone[0].tokens


def test_n_answers_draw_with_seeds_of_their_own(make):
    decoder = make("llama")
    flat = decoder.generate(PROMPTS[:2], max_new_tokens=8, sampling=Sampling(1.0, seed=5), n=3)
    assert len(flat) == 6
    repeated = [prompt for prompt in PROMPTS[:2] for _ in range(3)]
    again = decoder.generate(repeated, max_new_tokens=8, sampling=Sampling(1.0, seed=5))
    assert [one.tokens for one in flat] == [one.tokens for one in again]
    assert len({tuple(one.tokens) for one in flat[:3]}) > 1
    listed = decoder.generate(
        PROMPTS[:2], max_new_tokens=8, sampling=[Sampling(1.0, seed=5), Sampling(1.0, seed=8)], n=3
    )
    assert [one.tokens for one in listed] == [one.tokens for one in flat]
    streamed = {}
    for piece in decoder.generate(
        PROMPTS[:2], max_new_tokens=8, sampling=Sampling(1.0, seed=5), n=3, stream=True
    ):
        streamed.setdefault((piece.prompt, piece.sample), []).append(piece.token)
    assert [streamed[divmod(number, 3)] for number in range(6)] == [one.tokens for one in flat]


def test_logprobs_are_those_of_the_model_before_bias_and_penalties(make):
    decoder = make("llama")
    for ahead in (1, 5):
        engine = Engine(decoder, rows=3, pages=16)
        engine._most_ahead = ahead
        engine.add(PROMPTS[0], max_new_tokens=6, sampling=WAY, logprobs=3)
        engine.add(PROMPTS[1], max_new_tokens=6, sampling=Sampling(1.0, seed=1), logprobs=0)
        engine.add(PROMPTS[2], max_new_tokens=6)
        said = {0: [], 1: [], 2: []}
        while engine.is_busy:
            for token in engine.step():
                said[token.request].append(token)
        assert [token.logprobs for token in said[2]] == [None] * 6
        for number, count in ((0, 3), (1, 0)):
            text = list(PROMPTS[number])
            for token in said[number]:
                law = decoder(torch.tensor([text]))[0, -1].log_softmax(0)
                own, logprob, top = token.logprobs
                assert own == token.token
                assert logprob == pytest.approx(float(law[token.token]), abs=1e-4)
                best = law.topk(count)
                assert [name for name, _ in top] == best.indices.tolist()
                assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)
                text.append(token.token)


def test_answers_and_pieces_carry_logprobs(make):
    decoder = make("llama")
    answer, other = decoder.generate(PROMPTS[:2], max_new_tokens=4, logprobs=2)
    assert [one.token for one in answer.logprobs] == answer.tokens
    assert [one.top[0][0] for one in other.logprobs] == other.tokens  # greedy: the likeliest
    pieces = list(decoder.generate(PROMPTS[0], max_new_tokens=4, logprobs=2, stream=True))
    assert [piece.logprobs.token for piece in pieces] == answer.tokens
    assert [piece.logprobs.logprob for piece in pieces] == pytest.approx(
        [one.logprob for one in answer.logprobs], abs=1e-5
    )
    assert decoder.generate(PROMPTS[0], max_new_tokens=4)[0].logprobs is None


def test_a_banned_vocabulary_fails_one_request_only(make):
    decoder = make("llama")
    banned = Sampling(logit_bias=dict.fromkeys(range(23), float("-inf")))
    bad, good = decoder.generate(PROMPTS[:2], max_new_tokens=4, sampling=[banned, Sampling()])
    assert (bad.finish_reason, bad.tokens) == ("error", [])
    assert good.tokens == decoder.generate(PROMPTS[1], max_new_tokens=4)[0].tokens
    engine = Engine(decoder, pages=16)
    number = engine.add(PROMPTS[0], max_new_tokens=4, sampling=banned)
    with pytest.raises(RequestError) as caught:
        engine.step()
    assert caught.value.request == number


WRONG = [
    ({"repetition_penalty": 0.0}, RangeError, "repetition_penalty must be positive, got 0.0"),
    ({"repetition_penalty": float("inf")}, RangeError, "must be finite, got inf"),
    ({"presence_penalty": float("nan")}, RangeError, "presence_penalty must be finite, got nan"),
    ({"frequency_penalty": "1"}, DTypeError, "frequency_penalty must be one number, got '1'"),
    ({"logit_bias": [1.0]}, DTypeError, r"logit_bias must map token ids to numbers, got \[1.0\]"),
    ({"logit_bias": {"5": 1.0}}, DTypeError, "a token of logit_bias must be an integer, got str"),
    ({"logit_bias": {5: float("inf")}}, RangeError, "finite or −inf, got inf"),
    ({"logit_bias": {5: None}}, RangeError, "finite or −inf, got None"),
]


@pytest.mark.parametrize(("change", "kind", "sentence"), WRONG)
def test_wrong_penalties_are_refused(change, kind, sentence):
    with pytest.raises(kind, match=sentence):
        Sampling(**change)


def test_penalties_without_a_history_are_refused():
    with pytest.raises(RangeError, match="penalties of 1 rows need as many histories"):
        TokenSampler([WAY], 23, torch.device("cpu"))
    sampler = TokenSampler([WAY], 23, torch.device("cpu"), histories=[History([1], [])])
    given = torch.zeros(1, 23)
    sampler(given, torch.zeros(1).long())
    assert not given.any()  # the caller's logits stay


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A tiny random checkpoint: transformers' model, and ours from the same files."""
    folder = tmp_path_factory.mktemp("peer")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.4,
        eos_token_id=[7, 11],
        bos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model, Decoder.from_pretrained(folder, dtype="float32")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"sequence_bias": [[[5], 4.0], [[9], -3.0]]}, {"logit_bias": {5: 4.0, 9: -3.0}}),
        (
            {"repetition_penalty": 0.8, "sequence_bias": [[[5], 2.0]]},
            {"repetition_penalty": 0.8, "logit_bias": {5: 2.0}},
        ),
    ],
)
def test_greedy_answers_equal_those_of_transformers(peer, theirs, ours):
    model, decoder = peer
    assert decoder.stop_ids == [7, 11]
    for seed in range(5):
        prompt = torch.randint(1, 40, (1, 6), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            whole = model.generate(prompt, max_new_tokens=20, do_sample=False, **theirs)
        (answer,) = decoder.generate(
            prompt.tolist(), max_new_tokens=20, sampling=Sampling(**ours) if ours else None
        )
        assert answer.tokens == whole[0, 6:].tolist()
        assert (answer.finish_reason == "stop") == (answer.tokens[-1] in (7, 11))
