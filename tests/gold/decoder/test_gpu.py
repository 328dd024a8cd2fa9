"""The short step on a GPU: its kernels against float64, captured steps and searches against a CPU.

Skips where there is no GPU.
"""

from itertools import accumulate, chain

import pytest
import torch
from torch.nn import functional

from trapline.gold import paged_attention
from trapline.gold.decoder import beams, beams_device, fused_step
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.decode_step import DecodeStep
from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.pool import Pool
from trapline.gold.decoder.rope import angles, rotate
from trapline.gold.decoder.sampling import ranked
from trapline.gold.decoder.step_ops import DecodeBatch
from trapline.gold.decoder.tile_config import SHORT_TAIL

pytestmark = pytest.mark.needs_gpu
SIZES = {"num_hidden_layers": 2, "max_position_embeddings": 512, "vocab_size": 523}
SMALL = {
    **SIZES,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FAMILIES = {
    "llama": {**SMALL, "model_type": "llama"},
    "mistral": {**SMALL, "model_type": "mistral", "sliding_window": 40, "head_dim": 24},
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 523,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
}
#: Width, query heads, key heads, head width, hidden: the layers of the benchmark's shapes.
LAYERS = {
    "254M": (1024, 16, 8, 64, 2816),
    "1.7B": (2048, 16, 8, 128, 6144),
    "8B": (4096, 32, 8, 128, 14336),
    "odd": (200, 6, 2, 40, 333),
}
DEVICE = "cuda"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 20, [2], [7, 1, 8] * 20]
STEPS = 40


def random_decoder(raw, spread=0.12):
    torch.manual_seed(7)
    decoder = Decoder(from_dict(raw)).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn_like(parameter) * spread)
    return decoder.requires_grad_(False)


def one_layer(name, vocabulary=SIZES["vocab_size"]):
    width, heads, groups, head, hidden = LAYERS[name]
    raw = {
        **SIZES,
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
    }
    return random_decoder(raw, 0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_generation_matches_the_cpu(family):
    decoder = random_decoder(FAMILIES[family])
    options = {"max_new_tokens": STEPS, "stop_ids": [5]}
    expected = generate(decoder, PROMPTS, **options)
    assert generate(decoder.to("cuda"), PROMPTS, **options) == expected


def searched(family, **options):
    """What a search finds on the CPU and on the GPU."""
    decoder = random_decoder(FAMILIES[family])
    expected = beams.search(decoder, PROMPTS, **options)
    return expected, beams.search(decoder.to("cuda"), PROMPTS, **options)


def tokens_of(found):
    return [[beam.tokens for beam in one] for one in found]


@pytest.mark.parametrize("policy", ["canonical", "hf", "vllm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_searches_match_the_cpu(family, policy, same_beams):
    options = {"beam_width": 4, "max_new_tokens": STEPS, "eos_id": [4, 11], "policy": policy}
    same_beams(*searched(family, **options))


def test_the_prompt_pass_is_captured_from_the_second_batch_on(monkeypatch):
    """The first batch is run, the second recorded, others replayed; long ones are always run."""
    decoder = random_decoder(FAMILIES["llama"])
    rules = {"beam_width": 3, "max_new_tokens": 6, "eos_id": 4}
    batches = [[[token + more for token in one] for one in PROMPTS] for more in range(5)]
    expected = [beams.search(decoder, batch, **rules) for batch in batches]
    passes = []
    run = beams_device.PromptPass._remember
    monkeypatch.setattr(
        beams_device.PromptPass, "_remember", lambda one: (passes.append(1), run(one))[1]
    )
    for longest, ran in ((beams_device.LONGEST, 4), (1, 5)):
        monkeypatch.setattr(beams_device, "LONGEST", longest)
        search, passes[:] = beams.Searcher(decoder.to("cuda"), **rules), []
        for batch, wanted in zip(batches, expected, strict=True):
            assert tokens_of(search(batch)) == tokens_of(wanted)
        assert len(passes) == ran  # the first, two rehearsals and the recording; or every batch


def test_a_search_continues_into_long_tails():
    """Steps with long tails are another graph, captured when the first of them comes."""
    options = {"max_new_tokens": SHORT_TAIL + 20, "eos_id": 4, "policy": "vllm"}
    expected, found = searched("llama", beam_width=3, **options)
    assert max(len(beam.tokens) for one in expected for beam in one) > SHORT_TAIL + 10
    assert tokens_of(found) == tokens_of(expected)


@pytest.mark.parametrize(("width", "steps"), [(1, STEPS), (20, 6)])
def test_one_beam_and_wide_beams_match_the_cpu(width, steps):
    """One beam attends to its prompt; 20 have more candidates than one program compares."""
    expected, found = searched("llama", beam_width=width, max_new_tokens=steps, eos_id=4)
    assert tokens_of(found) == tokens_of(expected)


def exact_logits(decoder, texts):
    """After each text, by one layer in float64 and with nothing of ours but rotary angles."""
    config, layer = decoder.config, decoder.layers[0]
    attention, feedforward = layer.attention, layer.feedforward
    device = decoder.device

    def times(x, linear):
        return x @ linear.weight.double().T

    def normed(x, norm):
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + config.norm_eps)
        return x * scale * norm.weight.double()

    places = torch.cat([torch.arange(len(text)) for text in texts]).to(device)
    x = decoder.embedding.weight.double()[
        torch.tensor(list(chain.from_iterable(texts)), device=device)
    ]
    h = normed(x, layer.attention_norm)
    parts = (times(h, one) for one in (attention.q, attention.k, attention.v))
    q, k, v = (one.view(len(x), -1, config.head_dim) for one in parts)
    turn = angles(config.rope, config.head_dim, places, x)
    q, k = rotate(normed(q, attention.q_norm), *turn), rotate(normed(k, attention.k_norm), *turn)
    ratio = config.heads // config.kv_heads
    k, v = (one.repeat_interleave(ratio, dim=1) for one in (k, v))
    ends = list(accumulate(map(len, texts)))
    seen = []
    for text, end in zip(texts, ends, strict=True):
        here = slice(end - len(text), end)
        scores = torch.einsum("hd,shd->hs", q[end - 1], k[here]) * config.head_dim**-0.5
        seen.append(torch.einsum("hs,shd->hd", torch.softmax(scores, dim=1), v[here]).flatten())
    x = x[torch.tensor(ends, device=device) - 1] + times(torch.stack(seen), attention.out)
    h = normed(x, layer.feedforward_norm)
    gated = functional.silu(times(h, feedforward.gate)) * times(h, feedforward.up)
    return times(normed(x + times(gated, feedforward.down), decoder.norm), decoder.head)


def check_error(found, expected, dtype):
    error = ((found - expected).norm() / expected.norm()).item()
    assert error <= (1e-5 if dtype == torch.float32 else 2e-2), error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rows", [8, 64, 1, 16, 40, 100])
def test_a_layer_against_float64(name, rows, dtype):
    """Every cut that the benchmark's shapes are given, and what is stored on the way."""
    with torch.device("cuda"):
        decoder = one_layer(name).to(dtype)
    pool = Pool(decoder.config, rows * 4, 16, dtype, decoder.device)
    forward = DecodeStep(decoder, pool, rows)
    assert fused_step.suits(decoder)
    lengths = torch.arange(rows, device="cuda") % 50 + 3
    texts = [((torch.arange(n) * 7 + row) % 500).tolist() for row, n in enumerate(lengths.tolist())]
    ids = torch.arange(rows, device="cuda") % 500
    sequences = [pool.open() for _ in texts]
    for sequence in sequences:
        sequence.reserve(64)
    decoder.step(texts, sequences)
    table = torch.tensor([one.table for one in sequences], dtype=torch.int32, device="cuda")
    active = torch.ones(rows, dtype=torch.bool, device="cuda")
    found = forward.logits(
        DecodeBatch(ids, lengths, active, table, 16, table, 16, lengths)
    ).double()
    whole = [[*text, int(token)] for text, token in zip(texts, ids, strict=True)]
    expected = exact_logits(decoder, whole)
    check_error(found, expected, dtype)


def first_tokens(rows):
    """Row i feeds token i as its first; it has one page."""
    ids = torch.arange(rows, device=DEVICE)
    active, positions = torch.ones(rows, dtype=torch.bool, device=DEVICE), torch.zeros_like(ids)
    table = ids.int()[:, None]
    return DecodeBatch(ids, positions, active, table, 16, table, 16, positions)


def test_the_likeliest_tokens_of_many_rows_and_a_small_vocabulary():
    """Its head is cut as the other products are, but leaves its best."""
    with torch.device(DEVICE):
        decoder = one_layer("254M", vocabulary=512).bfloat16()
    rows = 40
    pool = Pool(decoder.config, rows, 16, torch.bfloat16, decoder.device)
    forward = DecodeStep(decoder, pool, rows)
    given = first_tokens(rows)
    made, tokens = torch.zeros((2, rows), dtype=torch.int64, device=DEVICE)
    history = made[:, None].clone()
    expected = forward.logits(given).argmax(dim=-1)
    forward.fused._place.fill_(-7)
    forward.fused.pick(given, made, tokens, history)
    assert torch.equal(tokens, expected)


#: Groups, beams, and what they share.
GROUPS = {"8x8": (8, 8, 37), "3x5": (3, 5, 200), "5x5": (5, 5, 130), "1x8": (1, 8, 300)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tail", [1, SHORT_TAIL - 24, SHORT_TAIL + 36])
@pytest.mark.parametrize("shape", GROUPS)
def test_a_layer_of_beams_against_float64(shape, tail, dtype):
    """Groups of rows that begin alike; what a row has alone lies anywhere."""
    with torch.device(DEVICE):
        decoder = one_layer("254M").to(dtype)
    groups, width, prefix = GROUPS[shape]
    rows, length = groups * width, prefix + tail
    texts = [
        [(7 * at + (row // width if at < prefix else row)) % 500 for at in range(length)]
        for row in range(rows)
    ]
    pool = Pool(decoder.config, rows * (length // 16 + 1), 16, dtype, decoder.device)
    forward = DecodeStep(decoder, pool, rows)
    sequences = [pool.open() for _ in texts]
    for sequence in sequences:
        sequence.reserve(length + 1)
    decoder.step(texts, sequences)
    tails = torch.stack([one.slots(prefix, length + 1) for one in sequences]).int().to(DEVICE)
    pages = [one.table[: prefix // 16 + 1] for one in sequences[::width]]
    given = DecodeBatch(
        ids=torch.arange(rows, device=DEVICE),
        positions=torch.full((rows,), length, device=DEVICE),
        active=torch.ones(rows, dtype=torch.bool, device=DEVICE),
        tails=tails,
        tail_size=1,
        pages=torch.tensor(pages, dtype=torch.int32, device=DEVICE),
        page_size=16,
        prefix=torch.full((groups,), prefix, dtype=torch.int32, device=DEVICE),
        beams=width,
    )
    found = forward.logits(given).double()
    expected = exact_logits(decoder, [[*text, row] for row, text in enumerate(texts)])
    check_error(found, expected, dtype)


@pytest.mark.parametrize("rows", [8, 64])
def test_candidates_from_group_maxima_match_the_logits(rows):
    """Ties and a row without a softmax too."""
    with torch.device(DEVICE):
        decoder = one_layer("254M", vocabulary=20_004).bfloat16()
        decoder.head.weight[17_000:17_040] = decoder.head.weight[3]
        decoder.embedding.weight[rows - 1] = float("nan")
    pool = Pool(decoder.config, rows, 16, torch.bfloat16, decoder.device)
    forward = DecodeStep(decoder, pool, rows)
    given = first_tokens(rows)
    logits, found = forward.ranked(given, 16)
    expected = ranked(logits, 16)
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert not torch.isfinite(found.lse[-1])
    assert torch.isfinite(found.lse[:-1]).all()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("bits", [8, 4, "fp8"])
@pytest.mark.parametrize("pages", [1, 60])
def test_unquantisable_rows_are_nan_for_their_sequence_only(pages, bits, family, value, side):
    """One number of row 1 of sequence 0 is broken, as a key or as a value; heads of 32 and 24."""
    config = from_dict(FAMILIES[family])
    numbers = torch.Generator(DEVICE).manual_seed(1)
    rows = torch.randn(2, 32 * pages, 2, config.head_dim, generator=numbers, device=DEVICE)
    slots = torch.arange(32 * pages, device=DEVICE)
    stored = [
        Pool(config, 2 * pages, 16, torch.float32, torch.device(DEVICE), bits).layer(0)
        for _ in range(2)
    ]
    stored[0].put(slots, *rows)
    rows[side, 1, 0, 3] = value
    stored[1].put(slots, *rows)
    q = torch.ones(2, 4, config.head_dim, device=DEVICE)
    table = torch.arange(2 * pages, dtype=torch.int32, device=DEVICE).view(2, pages)
    lengths = torch.tensor([16 * pages] * 2, dtype=torch.int32, device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16):
        clean, found = (
            paged_attention(q.to(dtype), **one.pages(), block_table=table, seq_lens=lengths)
            for one in stored
        )
        assert clean.isfinite().all()
        assert found[0, :2].isnan().all()
        assert torch.equal(found[0, 2:], clean[0, 2:])
        assert torch.equal(found[1], clean[1])


@pytest.mark.parametrize("bits", [None, 8, 4, "fp8"])
def test_a_nan_prompt_fails_one_request_only(bits, to_the_end):
    decoder = random_decoder(FAMILIES["llama"]).to(DEVICE)

    def answers(prompts):
        engine = Engine(decoder, rows=3, pages=64, page_size=16, bits=bits)
        for prompt in prompts:
            engine.add(prompt, max_new_tokens=40)
        return to_the_end(engine, 200)

    expected, _ = answers([[1, 2, 3], [4, 5], [6]])
    broken = next(token for token in range(7, 523) if token not in chain(*expected.values()))
    decoder.embedding.weight[broken] = float("nan")
    said, sentences = answers([[1, 2, 3], [4, 5], [6], [1, broken, 3, 4, 5]])
    assert said == expected
    assert sentences == ["the logits of request 3 are NaN or have no softmax"]
