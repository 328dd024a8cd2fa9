"""Hugging Face checkpoints: random ones of all families give transformers' logits."""

import dataclasses
import json
import math
import random
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.errors import DTypeError, RangeError, ShapeError

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen3": transformers.Qwen3Config,
    "gpt2": transformers.GPT2Config,
    "qwen2": transformers.Qwen2Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}
NEWER = ["qwen2", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"]
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16}
#: Their plain loops; their grouped products refuse small experts.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", **STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", **STRETCHED},
    {"rope_type": "yarn", **STRETCHED, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", **STRETCHED, "attention_factor": 0.7},
    {"rope_type": "yarn", **STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.3},
]


def settings(family, seed):
    """A small configuration drawn at random; the rotary variants come in turn."""
    draw = random.Random(f"{family} {seed}")
    if family == "gpt2":
        heads = draw.choice([1, 2, 4])
        sizes = {"n_embd": 8 * heads, "n_head": heads, "n_layer": draw.choice([1, 3])}
        return {
            "vocab_size": draw.randint(20, 60),
            "n_positions": 64,
            "n_inner": draw.choice([None, 20]),
            "layer_norm_epsilon": draw.choice([1e-5, 1e-3]),
            "tie_word_embeddings": draw.random() < 0.5,
            **sizes,
        }
    groups, per_group = draw.choice([1, 2, 3]), draw.choice([1, 2, 4])
    head_dim = draw.choice([4, 6, 16])
    made = {
        "vocab_size": draw.randint(20, 60),
        "hidden_size": head_dim * groups * per_group,
        "intermediate_size": draw.randint(8, 40),
        "num_hidden_layers": draw.choice([1, 3]),
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "head_dim": draw.choice([head_dim, 8]),
        "max_position_embeddings": 64,
        "rms_norm_eps": draw.choice([1e-6, 1e-4]),
        "tie_word_embeddings": draw.random() < 0.5,
        "rope_parameters": {"rope_theta": draw.choice([100.0, 10_000.0]), **ROPES[seed % 8]},
    }
    if family == "llama":
        biased = draw.random() < 0.5
        return {**made, "attention_bias": biased, "mlp_bias": biased}
    made["sliding_window"] = draw.choice([None, 4])
    if family.startswith("qwen") and made["sliding_window"]:
        made |= {"use_sliding_window": True, "max_window_layers": draw.choice([0, 1])}
    return made | own_settings(family, made, seed, draw)


def own_settings(family, made, seed, draw):
    """What a family has beyond Llama and Mistral."""
    if family == "phi3":
        # Its heads are as wide as the model, its rotary positions plain.
        made["head_dim"] = made["hidden_size"] // made["num_attention_heads"]
        return {"rope_parameters": {"rope_theta": 100.0}, "pad_token_id": 0}
    if family.startswith("gemma"):
        gemma = {
            "sliding_window": 4,
            "query_pre_attn_scalar": draw.choice([3, 16]),
            "final_logit_softcapping": draw.choice([None, 3.0]),
            "num_hidden_layers": 3,
        }
        if family == "gemma2":
            return {**gemma, "attn_logit_softcapping": draw.choice([None, 1.5])}
        ropes = {
            "full_attention": {"rope_theta": 500.0, **ROPES[seed % 3]},
            "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"},
        }
        kinds = draw.choice([None, ["full_attention", "sliding_attention", "full_attention"]])
        return {**gemma, "rope_parameters": ropes, "layer_types": kinds}
    experts = {"num_experts_per_tok": draw.choice([1, 2, 3])}
    if family == "mixtral":
        return {**experts, "num_local_experts": draw.choice([3, 6])}
    if family == "qwen3_moe":
        return {
            **experts,
            "num_experts": draw.choice([3, 6]),
            "moe_intermediate_size": 10,
            "norm_topk_prob": draw.random() < 0.5,
            "mlp_only_layers": draw.choice([None, [0]]),
            "decoder_sparse_step": draw.choice([1, 2]),
        }
    return {}


def random_model(family, seed):
    """One of theirs, with weights large enough that every part of it matters."""
    torch.manual_seed(seed)
    config = CONFIGS[family](**settings(family, seed))
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval().requires_grad_(False)


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def same_weights(one, other):
    """Bit for bit; logits need not be, as sums may depend on where in memory a tensor lies."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


def check(family, seed, folder):
    """Loaded here: the same logits, whole and cached. Saved here: read back by both."""
    theirs = random_model(family, seed)
    theirs.save_pretrained(folder / "theirs")
    ours = Decoder.from_pretrained(folder / "theirs").requires_grad_(False)
    ids = torch.randint(0, ours.config.vocab, (2, 40))
    expected = theirs(ids).logits
    assert relative(ours(ids), expected) <= 1e-5
    caches = [ours.new_cache() for _ in ids]
    for start, end in ((0, 23), (23, 24), (24, 40)):
        logits = ours.step([row[start:end].tolist() for row in ids], caches)
        assert relative(logits, expected[:, end - 1]) <= 1e-5
    ours.save_pretrained(folder / "ours")
    again = Decoder.from_pretrained(folder / "ours")
    assert again.config == ours.config
    assert same_weights(again, ours)
    back = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", **EAGER)
    assert same_weights(back, theirs)
    with torch.no_grad():
        assert relative(again(ids), expected) <= 1e-5
        assert relative(back(ids).logits, expected) <= 1e-5


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_random_configurations_match_transformers(family, seed, tmp_path):
    check(family, seed, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_random_gpt2_configurations_match_transformers(seed, tmp_path):
    check("gpt2", seed, tmp_path)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", NEWER)
def test_newer_families_match_transformers(family, seed, tmp_path):
    check(family, seed, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
def test_many_random_configurations_match_transformers(family, tmp_path):
    for seed in range(100, 150):
        check(family, seed, tmp_path / str(seed))


YARN = {"rope_type": "yarn", **STRETCHED}
LLAMA3 = {**ROPES[3], "rope_theta": 100.0}
SHORT_LLAMA3 = {k: v for k, v in LLAMA3.items() if not k.startswith("original")}
BESIDE = {"original_max_position_embeddings": 48}
ROTARY_FILES = {
    "both tables": {"rope_scaling": YARN, "rope_theta": 100.0},
    "both tables, two bases": {"rope_scaling": {**YARN, "rope_theta": 50.0}},
    "llama3 without its length": {"rope_parameters": SHORT_LLAMA3},
    "llama3, length beside": {"rope_parameters": SHORT_LLAMA3, **BESIDE},
    "llama3, two lengths": {"rope_parameters": LLAMA3, **BESIDE},
    "yarn, two lengths": {"rope_parameters": {**YARN, "rope_theta": 100.0}, **BESIDE},
    "yarn, factor null": {"rope_parameters": {**YARN, "rope_theta": 100.0, "factor": None}},
    "yarn, zeros": {"rope_parameters": {**YARN, "beta_fast": 0, "beta_slow": 0, "mscale": 0}},
}


@pytest.mark.parametrize("which", ROTARY_FILES)
def test_rope_scaling_is_read_as_in_transformers(which, tmp_path):
    random_model("qwen3", 0).save_pretrained(tmp_path)
    place = tmp_path / "config.json"
    raw = json.loads(place.read_text())
    raw["rope_parameters"]["rope_theta"] = 100.0
    place.write_text(json.dumps(raw | ROTARY_FILES[which]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = Decoder.from_pretrained(tmp_path)
    ids = torch.randint(0, ours.config.vocab, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert relative(ours(ids), theirs(ids).logits) <= 1e-5


def test_hidden_states_match_transformers(tmp_path):
    theirs = random_model("qwen3", 3)
    theirs.save_pretrained(tmp_path)
    ours = Decoder.from_pretrained(tmp_path)
    ids = torch.randint(0, ours.config.vocab, (1, 9))
    expected = theirs(ids, output_hidden_states=True).hidden_states
    features = ours.run([ids[0]], [ours.new_cache()], features=range(ours.config.layers)).features
    # The last of theirs is after the final norm.
    for mine, their in zip(features[:-1], expected[1:-1], strict=True):
        assert relative(mine, their[0]) <= 1e-5


def test_sixteen_bit_weights_keep_their_dtype(make, tmp_path):
    decoder = make("llama")
    ids = torch.tensor([[1, 2, 3, 4]])
    decoder.to(torch.bfloat16).save_pretrained(tmp_path)
    half = Decoder.from_pretrained(tmp_path)
    assert half.norm.weight.dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wide = Decoder.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert relative(wide(ids), theirs(ids).logits) <= 1e-5
        # Half the digits: one part in 256, and a few layers of it.
        assert relative(half(ids).float(), wide(ids)) <= 0.05


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shards_are_exchanged_with_transformers(make, family, tmp_path):
    decoder = make(family)
    decoder.save_pretrained(tmp_path, shard_bytes=3000)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0].startswith("model-00001-of-")
    ids = torch.tensor([[1, 2, 3]])
    again = Decoder.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same_weights(again, decoder)
    with torch.no_grad():
        assert relative(again(ids), theirs(ids).logits) <= 1e-5
    # Theirs are read too, and a missing shard is named.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    assert same_weights(Decoder.from_pretrained(tmp_path / "theirs"), decoder)
    (tmp_path / shards[-1]).unlink()
    with pytest.raises(FileNotFoundError, match=shards[-1]):
        Decoder.from_pretrained(tmp_path)
    # Saved again in one piece, the old index does not stand in the way.
    decoder.save_pretrained(tmp_path)
    assert same_weights(Decoder.from_pretrained(tmp_path), decoder)


def test_files_of_an_earlier_save_are_removed(make, tmp_path):
    """Weights that lie beside newer ones would be taken for them."""
    old, new = make("llama"), make("llama")
    with torch.no_grad():
        new.norm.weight.add_(1.0)
    (tmp_path / "model-notes.safetensors").touch()
    # One file, many, fewer, one again: every save is the only one there.
    for decoder, shard_bytes in ((old, 1 << 30), (new, 2000), (old, 4000), (new, 1 << 30)):
        decoder.save_pretrained(tmp_path, shard_bytes=shard_bytes)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(theirs.model.norm.weight, decoder.norm.weight)
        left = {path.name for path in tmp_path.glob("model*.safetensors")}
        index = tmp_path / "model.safetensors.index.json"
        whole = {"weight_map": {"all": "model.safetensors"}}
        said = json.loads(index.read_text()) if index.exists() else whole
        assert left == {*said["weight_map"].values(), "model-notes.safetensors"}
        # Onto itself, from the files that are replaced.
        again = Decoder.from_pretrained(tmp_path)
        again.save_pretrained(tmp_path, shard_bytes=shard_bytes)
        assert same_weights(Decoder.from_pretrained(tmp_path), decoder)


@pytest.fixture(params=["llama", "gpt2"])
def folder(request, make, tmp_path):
    make(request.param).save_pretrained(tmp_path)
    return tmp_path


def store(folder, tensors):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def check_refused(folder, tensors, kind, sentence):
    store(folder, tensors)
    with pytest.raises(kind, match=sentence):
        Decoder.from_pretrained(folder)


def test_missing_and_misshapen_tensors_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if tensors[name].ndim < 2:
            continue
        rest = {k: v for k, v in tensors.items() if k != name}
        check_refused(folder, rest, ShapeError, f"no tensor {name}")
        wrong = tensors[name][:-1].contiguous()
        expected = rf"{name} has shape \({wrong.shape[0]}, .*expected \({len(wrong) + 1}, "
        check_refused(folder, {**rest, name: wrong}, ShapeError, expected)


def test_unexpected_tensor_is_rejected(folder):
    """Biases that the configuration denies, layers that it does not count: another model."""
    tensors = load_file(folder / "model.safetensors")
    gpt2 = any(name.startswith("transformer.") for name in tensors)
    layers = "transformer.h" if gpt2 else "model.layers"
    for name in (f"{layers}.0.extra.bias", f"{layers}.2.mlp.weight"):
        sentence = f"has {name}, which its configuration does not describe"
        check_refused(folder, {**tensors, name: torch.zeros(16)}, ShapeError, sentence)
    # Constants of older files are not weights.
    old = "transformer.h.0.attn.bias" if gpt2 else "model.layers.0.self_attn.rotary_emb.inv_freq"
    store(folder, {**tensors, old: torch.zeros(4)})
    Decoder.from_pretrained(folder)


def test_integer_weights_are_rejected(folder):
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    for dtype in (torch.int32, torch.float8_e4m3fn):
        sentence = f"{name} is {str(dtype).removeprefix('torch.')}"
        check_refused(folder, {**tensors, name: tensors[name].to(dtype)}, DTypeError, sentence)


@pytest.mark.parametrize("wrong", ["nope", "int32", torch.int8])
def test_other_dtypes_are_rejected(folder, wrong):
    with pytest.raises(DTypeError, match="dtype must be a float of"):
        Decoder.from_pretrained(folder, dtype=wrong)


def test_a_device_may_be_an_object_and_must_exist(folder):
    assert Decoder.from_pretrained(folder, device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(RangeError, match="device must be 'cpu' or 'cuda', got 'gpu'"):
        Decoder.from_pretrained(folder, device="gpu")


@pytest.mark.parametrize("wrong", ["5GB", 1.5])
def test_shard_bytes_must_be_an_integer(folder, tmp_path_factory, wrong):
    with pytest.raises(DTypeError, match="shard_bytes must be an integer"):
        Decoder.from_pretrained(folder).save_pretrained(
            tmp_path_factory.mktemp("out"), shard_bytes=wrong
        )


def test_broken_files_are_refused_with_a_sentence(folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        Decoder.from_pretrained(empty)
    shutil.copy(folder / "config.json", empty)
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        Decoder.from_pretrained(empty)
    (empty / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(RangeError, match="not a safetensors file"):
        Decoder.from_pretrained(empty)
    (empty / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(RangeError, match="not the index"):
        Decoder.from_pretrained(empty)
    for wrong, sentence in (("{", "not valid JSON"), ("[]", "must hold a JSON object")):
        (empty / "config.json").write_text(wrong)
        with pytest.raises(RangeError, match=sentence):
            Decoder.from_pretrained(empty)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 5,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
}
REFUSED = [
    ({"model_type": "other"}, "must be one of llama, mistral"),
    ({"hidden_act": "relu"}, "not silu"),
    ({"rope_scaling": {"type": "spiral"}}, "rope_type must be one of .*, got 'spiral'"),
    ({"rope_scaling": ["linear"]}, "must be a JSON object"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number, got '2'"),
    ({"rope_scaling": {"type": "linear"}}, "has no 'factor'"),
    ({"rope_scaling": {"type": "dynamic", "factor": None}}, "has no 'factor'"),
    ({"rope_scaling": {"type": "llama3"}}, "has no 'factor'"),
    ({"rope_scaling": {"type": "llama3", "factor": 8}}, "has no 'low_freq_factor'"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1}},
        "has no 'high_freq_factor'",
    ),
    ({"rope_scaling": {"type": "yarn"}}, "has no 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be positive, got 0"),
    ({"rope_scaling": {"type": "yarn", "factor": -2}}, "factor must be positive, got -2"),
    ({"rope_theta": 0}, "rope_theta must be positive, got 0"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "differ by layer type"),
    ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta must be a number, got nan"),
    ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2}}, "rope_theta of yarn"),
    (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2}},
        "rope_theta 500000.0 of rope_parameters is ignored",
    ),
    ({"vocab_size": "5"}, "vocab_size must be a positive integer, got '5'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
    ({"head_dim": -4}, "head_dim must be a positive integer, got -4"),
    (
        {"num_attention_heads": 2, "num_key_value_heads": 3},
        "multiple of key/value heads, got 2 and 3",
    ),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number, got nan"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
    (
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": None},
        "max_window_layers must be an integer, got None",
    ),
    ({"model_type": "mistral", "sliding_window": -3}, "sliding_window must be a positive integer"),
    (
        {"model_type": "mistral", "sliding_window": 3, "layer_types": ["full_attention"] * 2},
        "names 2 layers, there are 1",
    ),
]


@pytest.mark.parametrize(("wrong", "sentence"), REFUSED)
def test_unsupported_configurations_are_refused(wrong, sentence):
    with pytest.raises(RangeError, match=sentence):
        from_dict({**LLAMA, **wrong})


ROTARY_NUMBERS = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
}


FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("wrong", ["8", -8])
@pytest.mark.parametrize("kind", ROTARY_NUMBERS)
def test_every_number_of_rope_scaling_is_checked(kind, wrong):
    for name in ROTARY_NUMBERS[kind]:
        scaling = {"type": kind, "factor": 2.0, **FACTORS, name: wrong}
        with pytest.raises(RangeError, match=name):
            from_dict({**LLAMA, "rope_scaling": scaling})
    for wrong_factor in ("1", math.nan, math.inf):
        scaling = {"type": "yarn", "factor": 2.0, "attention_factor": wrong_factor}
        with pytest.raises(RangeError, match="attention_factor must be a number"):
            from_dict({**LLAMA, "rope_scaling": scaling})


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_missing_keys_default_as_in_transformers(family):
    """Mistral slides and shares heads, Qwen3's are 128 wide, whatever the model's width."""
    sizes = {**LLAMA, "model_type": family, "num_attention_heads": 32, "hidden_size": 64}
    for more in ({}, {"use_sliding_window": True, "max_window_layers": 0}):
        ours = from_dict({**sizes, **more})
        theirs = transformers.AutoConfig.for_model(**{**sizes, **more})
        assert ours.kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
        assert ours.window == getattr(theirs, "sliding_window", None)
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.tied == theirs.tie_word_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


def test_a_refused_save_changes_nothing(tmp_path):
    first, second = (Decoder(from_dict({**LLAMA, "vocab_size": size})) for size in (8, 9))
    first.save_pretrained(tmp_path / "model")
    for folder in ("model", "new"):
        with pytest.raises(RangeError, match="shard_bytes must be at least 1"):
            second.save_pretrained(tmp_path / folder, shard_bytes=0)
    assert Decoder.from_pretrained(tmp_path / "model").config == first.config
    assert not (tmp_path / "new").exists()


def test_missing_configuration_keys_are_named():
    with pytest.raises(RangeError, match="a llama has no 'vocab_size'"):
        from_dict({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    assert dataclasses.replace(from_dict(LLAMA), layers=3).layers == 3


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"n_head": 0}, "n_head must be a positive integer"),
        ({"n_embd": 15, "n_head": 4}, "15 does not divide into 4 heads"),
        ({"n_embd": 15, "n_head": 3}, "head_dim must be even, got 5"),
        ({"scale_attn_weights": False}, "scores scaled by 1/√D"),
    ],
)
def test_unsupported_gpt2_configurations_are_refused(make, wrong, sentence):
    with pytest.raises(RangeError, match=sentence):
        make("gpt2", **wrong)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_that_is_loaded_draws_no_embeddings(family, tmp_path, monkeypatch):
    """On the meta device a draw imports torch's compiler, which takes longer than torch itself."""
    config = from_dict({"model_type": family, **settings(family, 0)})
    drawn = []
    monkeypatch.setattr(torch.nn.init, "normal_", lambda tensor: drawn.append(tensor.device.type))
    Decoder(config).save_pretrained(tmp_path)
    assert set(drawn) == {"cpu"}
    drawn.clear()
    loaded = Decoder.from_pretrained(tmp_path)
    assert drawn == []
    assert all(parameter.requires_grad for parameter in loaded.parameters())
