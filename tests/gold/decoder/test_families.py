"""Families beyond Llama in every path: pages, engines, trees, 16 bits, saved files, refusals."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.calibrate import calibrate
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.experts import Experts
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.tree_decoding.drafter import drafter_config
from trapline.gold.tree_decoding.speculation import Speculation

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8]]
FAMILIES = ["qwen2", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def greedy(decoder, prompt, count):
    """By whole passes, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def test_engines_and_trees_answer_as_whole_passes(make, family):
    decoder = make(family)
    expected = [greedy(decoder, prompt, 9) for prompt in PROMPTS]
    found = decoder.generate(PROMPTS, max_new_tokens=9, stop_ids=[])
    assert [answer.tokens for answer in found] == expected
    drafted = decoder.generate(
        PROMPTS, max_new_tokens=9, stop_ids=[], speculate=Speculation("lookup", budget=6)
    )
    assert [answer.tokens for answer in drafted] == expected


@torch.no_grad()
def test_sixteen_bits_stay_near_single_precision(make, family):
    decoder, half = make(family), make(family).to(torch.bfloat16)
    ids = torch.tensor([PROMPTS[0]])
    whole, rounded = decoder(ids), half(ids).float()
    assert float((rounded - whole).abs().mean() / whole.abs().mean()) <= 0.05
    engine = Engine(half, rows=2, pages=8)
    engine.add(PROMPTS[0], max_new_tokens=5)
    while engine.is_busy:
        engine.step()


def test_defaults_of_missing_keys_are_those_of_transformers(family):
    sizes = {
        "model_type": family,
        "vocab_size": 5,
        "hidden_size": 64,
        "intermediate_size": 4,
        "num_hidden_layers": 7,
        "num_attention_heads": 32,
        "max_position_embeddings": 8,
    }
    ours, theirs = from_dict(sizes), transformers.AutoConfig.for_model(**sizes)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    if family == "gemma3_text":
        assert ours.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
    if family.startswith("gemma"):
        assert ours.softcap == (theirs.attn_logit_softcapping or 0.0)
        assert ours.logit_softcap == (theirs.final_logit_softcapping or 0.0)
        kinds = [
            "full_attention" if i in ours.full_layers else "sliding_attention" for i in range(7)
        ]
        assert kinds == theirs.layer_types
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    if ours.experts is not None:
        assert ours.experts.count == theirs.num_experts
        assert ours.experts.per_token == theirs.num_experts_per_tok
        assert ours.experts.renormalized == getattr(theirs, "norm_topk_prob", True)
    assert ours.window == theirs.sliding_window


@pytest.mark.parametrize("tokens", [1, 2, 9])
@torch.no_grad()
def test_experts_for_graphs_equal_the_loop(make, tokens):
    """Few tokens copy the weights of their experts, many run all experts."""
    experts = make("mixtral").layers[0].feedforward
    assert isinstance(experts, Experts)
    x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1))
    given = (x, *experts.route(x))
    torch.testing.assert_close(experts.mix_static(*given), experts.mix(*given))


@torch.no_grad()
def test_a_token_of_nan_does_not_spoil_the_others_of_an_expert(make):
    experts = make("mixtral").layers[0].feedforward
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    bad = x.clone()
    bad[2] = torch.nan
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(experts(bad)[others], experts(x)[others])
    assert experts(bad)[2].isnan().all()


def test_a_missing_expert_is_named(make, tmp_path):
    make("mixtral").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ShapeError, match=r"no tensor .*experts\.3\.w3\.weight"):
        Decoder.from_pretrained(tmp_path)


def test_older_files_of_gemma3_are_read_as_in_transformers(make, tmp_path):
    """`rope_theta`, `rope_local_base_freq`, `rope_scaling` and a pattern instead of tables."""
    make("gemma3_text", num_hidden_layers=3).save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    raw = json.loads(place.read_text())
    for key in ("rope_parameters", "layer_types"):
        del raw[key]
    raw |= {"rope_theta": 300.0, "rope_local_base_freq": 30.0, "sliding_window_pattern": 3}
    raw["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    place.write_text(json.dumps(raw))
    ours = Decoder.from_pretrained(tmp_path)
    assert (ours.config.full_layers, ours.config.rope.factor) == ((2,), 4.0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, 23, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("older", [False, True])
def test_the_text_part_of_a_gemma3_with_images(tmp_path, older):
    """The larger ones; older files name their tensors in another way."""
    small = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    vision = {**small, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    text = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"max_position_embeddings": 64, "sliding_window": 5}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=29
    )
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    if older:
        path = tmp_path / "model.safetensors"
        tensors = load_file(path)
        old = {}
        for name, tensor in tensors.items():
            name = name.replace("model.language_model.", "language_model.model.")
            old[name.replace("model.vision_tower.", "vision_tower.")] = tensor
        save_file(old, path, metadata={"format": "pt"})
    ours = Decoder.from_pretrained(tmp_path)
    ids = torch.randint(0, 28, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def test_a_drafter_for_a_gemma_has_plain_layers(make):
    body = drafter_config(make("gemma2").config, mask_id=1).body
    assert body.is_plain
    assert (body.dim, body.heads, body.head_dim) == (16, 4, 6)


def test_fused_kernels_serve_plain_layers_only(make, family):
    """Phi-3 differs from Llama in the names of its tensors; the others take the step in torch."""
    pytest.importorskip("triton")
    from trapline.gold.decoder.fused_step import suits
    from trapline.gold.tree_decoding.fast_rounds import supports

    decoder = make(family, head_dim=16)
    assert suits(decoder) == (family == "phi3")
    reason = supports(decoder, room=32, nodes=4)
    assert reason is None if family == "phi3" else "soft caps, post-norms or experts" in reason


def test_calibration_needs_one_set_of_positions(make):
    with pytest.raises(RangeError, match="calibrate needs one set of rotary positions"):
        calibrate(make("gemma3_text"), [[1, 2, 3]])


LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}


@pytest.mark.parametrize("kind", ["longrope", "su"])
@pytest.mark.parametrize("name", ["phi3", "llama"])
@torch.no_grad()
def test_longrope_is_that_of_transformers_on_both_sides_of_the_original_context(
    make, tmp_path, name, kind
):
    """transformers chooses factors by the length of each call, a decoder by its context."""
    more = {"original_max_position_embeddings": 16, "pad_token_id": 0}
    decoder = make(name, rope_scaling={**LONGROPE, "type": kind}, **more)
    decoder.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(0, 23, (1, 40), generator=torch.Generator().manual_seed(1))
    long, short = (Decoder.from_pretrained(tmp_path, context=context) for context in (None, 16))
    torch.testing.assert_close(long(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    near = ids[:, :16]
    torch.testing.assert_close(short(near), theirs(near).logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(long(near), short(near), atol=1e-2)
    prompt = ids[0, :14].tolist()
    (answer,) = long.generate([prompt], max_new_tokens=9, stop_ids=[])
    assert answer.tokens == greedy(long, prompt, 9)
    with pytest.raises(RangeError, match="the model has 16"):
        short.generate([prompt], max_new_tokens=9)
    short.save_pretrained(tmp_path)
    assert Decoder.from_pretrained(tmp_path).config == long.config


@pytest.mark.parametrize("context", [0, 65])
def test_a_context_outside_the_checkpoint_is_refused(make, tmp_path, context):
    make("gpt2").save_pretrained(tmp_path)
    with pytest.raises(RangeError, match=f"context must be between 1 and 64, got {context}"):
        Decoder.from_pretrained(tmp_path, context=context)


REFUSED = [
    ("gemma2", {"hidden_activation": "gelu"}, "activation 'gelu' is not gelu_pytorch_tanh"),
    ("gemma2", {"use_bidirectional_attention": True}, "a decoder is causal"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be positive"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive integer"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping of a gemma3_text"),
    ("gemma3_text", {"rope_scaling": ["linear"]}, "rope_scaling must be a JSON object"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "has no 'short_factor'"),
    ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": "1"}}, "long_factor must be a list"),
    ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [1, 0]}}, "long_factor must be positive"),
    ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [1]}}, "long_factor must have 2 entries"),
    ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "phi3 must be .* got 'yarn'"),
    ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor must be 1, got 0.75"),
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok must be at most 5, got 6"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts must be a positive integer"),
    ("mixtral", {"hidden_act": "gelu"}, "activation 'gelu' is not silu"),
]


@pytest.mark.parametrize(("name", "wrong", "sentence"), REFUSED)
def test_unsupported_settings_are_refused(make, name, wrong, sentence):
    with pytest.raises(RangeError, match=sentence):
        make(name, **wrong)


@pytest.mark.needs_gpu
@torch.no_grad()
def test_a_gpu_answers_as_the_cpu(make, families, family):
    sizes = {"hidden_size": 128, **({"head_dim": 32} if "head_dim" in families[family] else {})}
    here, there = make(family, **sizes), make(family, **sizes).to("cuda")
    ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(there(ids.cuda()).cpu(), here(ids), rtol=1e-4, atol=1e-4)
    expected, found = (
        decoder.generate(PROMPTS, max_new_tokens=9, stop_ids=[]) for decoder in (here, there)
    )
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
