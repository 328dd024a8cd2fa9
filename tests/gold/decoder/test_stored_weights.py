"""FP8 checkpoints and GGUF files, read as dense decoders."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.gguf_format import interleaved
from trapline.gold.errors import RangeError, ShapeError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


def saved(make, folder, method, scales_of, **settings):
    """A checkpoint whose projections are codes and scales; returns the exact weights."""
    make("qwen3").save_pretrained(folder)
    tensors, exact = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        if name.endswith("_proj.weight"):
            scale, spread = scales_of(tensors[name])
            codes = (tensors[name] / spread).to(torch.float8_e4m3fn)
            exact[name] = codes.float() * spread
            tensors[name] = codes
            end = "_scale_inv" if method == "fp8" else "_scale"
            tensors[name + end] = scale
            tensors[name.replace("weight", "input_scale")] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    place = folder / "config.json"
    raw = json.loads(place.read_text())
    raw["quantization_config"] = {"quant_method": method, **settings}
    place.write_text(json.dumps(raw))
    return exact


def in_blocks(weight, high=5, wide=7):
    """One scale for each block; the last ones are cut."""
    rows, columns = weight.shape
    shape = (-(-rows // high), -(-columns // wide))
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(rows)) * 0.01
    scale += weight.abs().max() / 448  # larger codes are NaN in older releases of torch
    spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return scale, spread


def of_rows(weight):
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    return scale, scale


def of_all(weight):
    scale = weight.abs().max().reshape(1) / 448
    return scale, scale


FLOATS = {"type": "float", "num_bits": 8}
STORED = {
    "blocks": ("fp8", in_blocks, {"weight_block_size": [5, 7]}),
    "one scale": ("fp8", of_all, {}),
    "compressed rows": (
        "compressed-tensors",
        of_rows,
        {"config_groups": {"g": {"weights": FLOATS}}},
    ),
    "compressed tensors": (
        "compressed-tensors",
        of_all,
        {"config_groups": {"g": {"weights": FLOATS}}},
    ),
    "compressed blocks": (
        "compressed-tensors",
        in_blocks,
        {"config_groups": {"g": {"weights": {**FLOATS, "block_structure": [5, 7]}}}},
    ),
}


@pytest.mark.parametrize("which", STORED)
def test_fp8_weights_are_codes_times_scales(make, which, tmp_path):
    method, scales_of, settings = STORED[which]
    exact = saved(make, tmp_path, method, scales_of, **settings)
    decoder = Decoder.from_pretrained(tmp_path)
    assert len(exact) == 14
    for number, layer in enumerate(decoder.layers):
        inner = f"model.layers.{number}"
        pairs = {"self_attn.q_proj": layer.attention.q, "mlp.down_proj": layer.feedforward.down}
        for name, module in pairs.items():
            assert torch.equal(module.weight, exact[f"{inner}.{name}.weight"])
    # Saved again they are dense.
    decoder.save_pretrained(tmp_path / "dense")
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
        torch.testing.assert_close(decoder(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)


def test_fp8_weights_take_the_dtype_of_the_embedding(make, tmp_path):
    saved(make, tmp_path, "fp8", of_all)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    assert Decoder.from_pretrained(tmp_path).layers[0].attention.q.weight.dtype == torch.bfloat16
    wide = Decoder.from_pretrained(tmp_path, dtype="float32")
    assert wide.layers[0].attention.q.weight.dtype == torch.float32


def test_wrong_fp8_checkpoints_are_refused(make, tmp_path):
    saved(make, tmp_path, "fp8", in_blocks, weight_block_size=[5, 7])
    place = tmp_path / "config.json"
    good = json.loads(place.read_text())

    def refuse(settings, kind, sentence):
        place.write_text(json.dumps(good | {"quantization_config": settings}))
        with pytest.raises(kind, match=sentence):
            Decoder.from_pretrained(tmp_path)

    refuse({"quant_method": "fp8"}, ShapeError, "no block size is set")
    refuse({"quant_method": "fp8", "weight_block_size": [4, 4]}, ShapeError, "for blocks of 4 × 4")
    refuse({"quant_method": "fp8", "weight_block_size": 128}, RangeError, "must be two integers")
    refuse({"quant_method": "awq"}, RangeError, "got 'awq'; use the checkpoint before")
    packed = {"config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}}
    refuse({"quant_method": "compressed-tensors", **packed}, RangeError, "got 4 bits of 'int'")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    sentence = r"mlp\.up_proj\.weight has 8 bits, but the checkpoint has no"
    refuse(good["quantization_config"], ShapeError, sentence)


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
REST = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 32,
    "vocab_size": 40,
}


def write_gguf(theirs, path, kind, more=lambda writer: None):
    """A file as others write it: matrices in `kind`, vectors in float32, Llama's heads turned."""
    config = theirs.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    more(writer)
    for name, tensor in theirs.state_dict().items():
        values = tensor.numpy().copy()
        _, _, inner = name.removeprefix("model.layers.").partition(".")
        base, _, part = inner.rpartition(".")
        if name in REST:
            target = REST[name]
        else:
            number = name.removeprefix("model.layers.").split(".")[0]
            target = f"blk.{number}.{NAMES[base]}.{part}"
        if family == "llama" and base in ("self_attn.q_proj", "self_attn.k_proj"):
            values = values[interleaved(len(values) // 32, 32)]
        if target == "output.weight" and config.tie_word_embeddings:
            continue
        if values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            stored = gguf.quants.quantize(values, kind)
            writer.add_tensor(target, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs_of(family, **changes):
    torch.manual_seed(3)
    sizes = {
        **WIDE,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = transformers.AutoConfig.for_model(family, **{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


TYPES = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [TYPES.F16, TYPES.Q8_0, TYPES.Q4_0])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_gguf_files_give_the_logits_of_their_weights(family, kind, tmp_path):
    theirs = theirs_of(family, tie_word_embeddings=family == "qwen3")
    write_gguf(theirs, tmp_path / "m.gguf", kind)
    for parameter in theirs.parameters():  # as the file has them
        if parameter.ndim == 2:
            stored = gguf.quants.quantize(parameter.numpy(), kind)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    ours = Decoder.from_pretrained(tmp_path / "m.gguf")
    assert ours.norm.weight.dtype == torch.float32
    expected = theirs(IDS).logits
    assert float((ours(IDS) - expected).abs().max() / expected.abs().max()) <= 1e-5
    half = Decoder.from_pretrained(str(tmp_path / "m.gguf"), dtype="bfloat16")
    assert half.head.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_positions_of_llama_3_are_found_by_their_factors(tmp_path):
    """A file holds the factors of the frequencies only."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    theirs = theirs_of("llama", rope_parameters=rope)
    plain = theirs_of("llama", rope_parameters={"rope_theta": 5e5}).model.rotary_emb.inv_freq
    factors = (plain / theirs.model.rotary_emb.inv_freq).numpy()
    write_gguf(
        theirs,
        tmp_path / "m.gguf",
        TYPES.F32,
        lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    ours = Decoder.from_pretrained(tmp_path / "m.gguf")
    assert ours.config.rope.kind == "llama3"
    expected = theirs(IDS).logits
    assert float((ours(IDS) - expected).abs().max() / expected.abs().max()) <= 1e-5
    write_gguf(
        theirs,
        tmp_path / "other.gguf",
        TYPES.F32,
        lambda writer: writer.add_tensor("rope_freqs.weight", np.sqrt(factors)),
    )
    with pytest.raises(RangeError, match="not those of Llama"):
        Decoder.from_pretrained(tmp_path / "other.gguf")


def test_end_tokens_and_stretched_positions_of_a_gguf_file(tmp_path):
    def more(writer):
        writer.add_eos_token_id(7)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write_gguf(theirs_of("qwen3"), tmp_path / "m.gguf", TYPES.F16, more)
    decoder = Decoder.from_pretrained(tmp_path / "m.gguf")
    assert decoder.stop_ids == [7]
    assert (decoder.config.rope.kind, decoder.config.rope.factor) == ("linear", 4.0)


def test_other_gguf_files_are_refused(tmp_path):
    def experts(writer):
        writer.add_expert_count(8)

    def vision(writer):
        writer.add_tensor("v.blk.0.ln1.weight", np.ones(4, np.float32))

    model = theirs_of("llama")
    for more, sentence in (
        (experts, "with experts are not supported"),
        (vision, r"has a tensor v\.blk\.0\.ln1\.weight, which no supported"),
    ):
        write_gguf(model, tmp_path / "m.gguf", TYPES.F16, more)
        with pytest.raises(RangeError, match=sentence):
            Decoder.from_pretrained(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "bert")
    writer.add_tensor("x", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(RangeError, match="architecture 'bert' is none of llama, qwen2, qwen3"):
        Decoder.from_pretrained(tmp_path / "b.gguf")


@pytest.mark.needs_gpu
@pytest.mark.parametrize("stored", ["fp8", "gguf"])
@torch.no_grad()
def test_stored_weights_give_the_same_logits_on_a_gpu(make, stored, tmp_path):
    if stored == "fp8":
        saved(make, tmp_path, "fp8", in_blocks, weight_block_size=[5, 7])
        decoder = Decoder.from_pretrained(tmp_path)
    else:
        write_gguf(theirs_of("llama"), tmp_path / "m.gguf", TYPES.Q8_0)
        decoder = Decoder.from_pretrained(tmp_path / "m.gguf")
    expected = decoder(IDS)
    found = decoder.to("cuda")(IDS.cuda()).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
