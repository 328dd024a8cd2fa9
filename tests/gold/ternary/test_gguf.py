"""GGUF: what is written comes back through the gguf package, value by value and token by token."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.generate import generate
from trapline.gold.errors import RangeError
from trapline.gold.ternary import gguf
from trapline.gold.ternary.gguf_decoder import to_gguf
from trapline.gold.ternary.layers import convert, dequantized
from trapline.gold.ternary.pack import to_blocks
from trapline.gold.ternary.packed_model import pack_model
from trapline.gold.ternary.training.tokenizer import train_tokenizer

package = pytest.importorskip("gguf")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def decoder(family="llama", tied=False, group_size=128, dim=128, vocab=20):
    """Two heads share one key/value head; every matrix ternary."""
    torch.manual_seed(5)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": 256,
    }
    rest = {"max_position_embeddings": 32, "tie_word_embeddings": tied}
    made = Decoder(from_dict({**shape, **sizes, **rest})).eval()
    convert(made, group_size)
    return made


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_files_round_trip(tmp_path, family, tied, kind):
    model = decoder(family, tied)
    to_gguf(pack_model(decoder(family, tied)), tmp_path / "m.gguf", kind)
    again = Decoder.from_pretrained(tmp_path / "m.gguf")
    assert again.config == replace(model.config, norm_eps=again.config.norm_eps)
    wanted = dequantized(model).state_dict()
    for name, value in again.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    prompt = [IDS[0].tolist()]
    assert generate(again, prompt, max_new_tokens=8) == generate(model, prompt, max_new_tokens=8)


def test_tq2_0_holds_groups_of_256(tmp_path):
    model = dequantized(decoder(group_size=256, dim=256))
    to_gguf(model, tmp_path / "m.gguf", "tq2_0", group_size=256)
    again = Decoder.from_pretrained(tmp_path / "m.gguf")
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    kinds = {one.tensor_type.name for one in package.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds == {"TQ2_0", "F32"}


def test_tq2_0_rejects_blocks_with_two_scales(tmp_path):
    with pytest.raises(RangeError, match=r"different scales.*f16 or q8_0"):
        to_gguf(decoder(dim=256), tmp_path / "m.gguf", "tq2_0")
    with pytest.raises(RangeError, match=r"not a multiple of 256: write f16 or q8_0, which lose"):
        to_gguf(decoder(), tmp_path / "m.gguf", "tq2_0")
    assert list(tmp_path.iterdir()) == []


def test_tq2_0_accepts_equal_neighbouring_scales():
    """Equal scales, or a neighbour without codes, fit one block; the package reads the same."""
    codes = np.random.default_rng(1).integers(-1, 2, (3, 512)).astype(np.int8)
    scales = np.full((3, 4), 0.5, dtype=np.float16)
    codes[1, :128], scales[1, 0] = 0, 0.25
    given = gguf.Tensor(None, codes, scales)
    stored, number = gguf.encode("w", given, "tq2_0")
    read = package.quants.dequantize(stored, package.GGMLQuantizationType(number))
    assert np.array_equal(read, given.dense())
    scales[2, 3] = 0.75
    with pytest.raises(RangeError, match="different scales"):
        gguf.encode("w", given, "tq2_0")


def test_negative_scale_beside_an_empty_group():
    codes = np.ones((2, 256), dtype=np.int8)
    codes[0, :128] = codes[1, 128:] = 0
    given = gguf.Tensor(None, codes, np.array([[0.5, -0.25], [-0.25, 0.5]], dtype=np.float16))
    stored, number = gguf.encode("w", given, "tq2_0")
    read = package.quants.dequantize(stored, package.GGMLQuantizationType(number))
    assert np.array_equal(read, given.dense())


@pytest.mark.parametrize("kind", ["q8_0", "tq2_0", "q2_0"])
def test_error_for_groups_of_16_suggests_f16(kind):
    codes = np.ones((1, 256), dtype=np.int8)
    scales = np.arange(1, 17, dtype=np.float16)[None]
    with pytest.raises(RangeError, match=r"write f16, which loses nothing$"):
        gguf.encode("w", gguf.Tensor(None, codes, scales, 16), kind)


def test_group_wider_than_the_row():
    """Neither memory for the whole group nor a refusal: the row has one scale."""
    codes = np.ones((2, 256), dtype=np.int8)
    given = gguf.Tensor(None, codes, np.array([[0.5], [0.25]], dtype=np.float16), 10**12 + 1)
    stored, number = gguf.encode("w", given, "tq2_0")
    read = package.quants.dequantize(stored, package.GGMLQuantizationType(number))
    assert np.array_equal(read, codes * np.array([[0.5], [0.25]]))


def test_q2_0_warns(tmp_path):
    model = decoder()
    with pytest.warns(UserWarning, match="blocks of 64"):
        to_gguf(model, tmp_path / "m.gguf", "q2_0")
    codes, scales = (part.numpy() for part in model.layers[0].feedforward.up.ternary())
    assert to_blocks(codes, scales).tobytes() in (tmp_path / "m.gguf").read_bytes()
    if 42 not in {int(kind) for kind in package.GGMLQuantizationType}:
        with pytest.raises(RangeError, match="two meanings"):
            Decoder.from_pretrained(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["m.safetensors", "m", "gguf", "link.gguf"])
def test_other_file_names_raise(tmp_path, name):
    """A link is what it leads to: a file of the checkpoint, perhaps."""
    (tmp_path / "model.safetensors").write_text("kept")
    (tmp_path / "link.gguf").symlink_to("model.safetensors")
    with pytest.raises(RangeError, match=r"must end in \.gguf"):
        to_gguf(decoder(), tmp_path / name, "f16")
    assert (tmp_path / "model.safetensors").read_text() == "kept"
    assert len(list(tmp_path.iterdir())) == 2


def test_link_to_a_gguf_file_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to("disk/m.gguf")
    to_gguf(decoder(), tmp_path / "latest", "f16")
    assert (tmp_path / "latest").is_symlink()
    assert Decoder.from_pretrained(tmp_path / "disk" / "m.gguf").config.vocab == 20
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["m.gguf"]


def test_dense_models_and_invalid_files_raise(tmp_path):
    dense = Decoder(decoder().config)
    with pytest.raises(RangeError, match="is not ternary"):
        to_gguf(dense, tmp_path / "m.gguf", "f16")
    with pytest.raises(RangeError, match="one of f16"):
        to_gguf(decoder(), tmp_path / "m.gguf", "q4_0")
    with pytest.raises(RangeError, match="is not a file"):
        Decoder.from_pretrained(tmp_path / "m.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGML" + bytes(100))
    with pytest.raises(RangeError, match="cannot be read"):
        Decoder.from_pretrained(tmp_path / "bad.gguf")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["f16", "q8_0", "tq2_0"])
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_llama_cpp_generates_the_same_tokens(tmp_path, family, tied, kind):
    """Where llama-cpp-python is installed, it continues a prompt with our tokens."""
    llama_cpp = pytest.importorskip("llama_cpp")
    documents = [f"the river number {number} runs to the sea" for number in range(200)]
    tokenizer = train_tokenizer(documents, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    group = 256 if kind == "tq2_0" else 128
    model = decoder(family, tied, group, dim=256, vocab=300)
    file = tmp_path / "m.gguf"
    to_gguf(model, file, kind, tokenizer=tmp_path / "tokenizer.json", group_size=group)
    prompt = tokenizer.encode("the river").ids
    theirs = llama_cpp.Llama(str(file), n_ctx=32, verbose=False)
    assert theirs.tokenize(b"the river", add_bos=False) == prompt
    found = []
    for token in theirs.generate(prompt, temp=0.0, repeat_penalty=1.0):
        found.append(token)
        if len(found) == 8:
            break
    assert found == generate(dequantized(model), [prompt], max_new_tokens=8)[0]


def test_tokeniser_is_written(tmp_path):
    documents = [f"the river number {number} runs to the sea" for number in range(200)]
    tokenizer = train_tokenizer(documents, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = decoder("qwen3", tied=True, vocab=300)
    to_gguf(model, tmp_path / "m.gguf", "f16", tokenizer=tmp_path / "tokenizer.json")
    fields = package.GGUFReader(tmp_path / "m.gguf").fields
    words = fields["tokenizer.ggml.tokens"]
    found = [bytes(words.parts[at]).decode() for at in words.data]
    assert found == [tokenizer.id_to_token(number) for number in range(300)]
    assert len(fields["tokenizer.ggml.merges"].data) == 300 - 257
    ends = fields["tokenizer.ggml.eos_token_id"]
    assert ends.parts[ends.data[0]][0] == 0


def words(tmp_path, **changes):
    """A tokeniser's file, changed."""
    documents = [f"the river number {number} runs to the sea" for number in range(200)]
    place = tmp_path / "tokenizer.json"
    train_tokenizer(documents, 300).save(str(place))
    place.write_text(json.dumps({**json.loads(place.read_text()), **changes}))
    return place


def test_end_token_of_the_checkpoint_is_written(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    model = decoder("qwen3", tied=True, vocab=300)
    to_gguf(model, tmp_path / "m.gguf", "f16", tokenizer=words(tmp_path))
    end = package.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.eos_token_id"]
    assert end.parts[end.data[0]][0] == 7


def test_unsupported_tokenisers_raise_or_warn(tmp_path):
    model, file = decoder("qwen3", tied=True, vocab=300), tmp_path / "m.gguf"
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    for other in ({"pre_tokenizer": {"type": "Metaspace"}}, {"pre_tokenizer": None}, {"model": {}}):
        with pytest.raises(RangeError, match="not a byte-level BPE"):
            to_gguf(model, file, "f16", tokenizer=words(tmp_path, **other))
    for splits in (byte_level, {"type": "Sequence", "pretokenizers": [{}, byte_level]}):
        with pytest.warns(UserWarning, match="splits text otherwise"):
            to_gguf(model, file, "f16", tokenizer=words(tmp_path, pre_tokenizer=splits))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
    ],
)
def test_normalising_tokenisers_warn(tmp_path, change):
    model, file = decoder("qwen3", tied=True, vocab=300), tmp_path / "m.gguf"
    with pytest.warns(UserWarning, match="changes text before"):
        to_gguf(model, file, "f16", tokenizer=words(tmp_path, **change))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '"BPE"',
        '{"pre_tokenizer": [], "model": []}',
        '{"pre_tokenizer": {"type": "ByteLevel"}, "model": {"type": "BPE"}}',
        '{"pre_tokenizer": {"type": "Sequence", "pretokenizers": [3]}, "model": {"type": "BPE"}}',
    ],
)
def test_invalid_tokeniser_file_raises(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    model, file = decoder("qwen3", tied=True), tmp_path / "m.gguf"
    with pytest.raises(RangeError, match=r"tokenizer\.json is not a byte-level BPE tokeniser"):
        to_gguf(model, file, "f16", tokenizer=tmp_path / "tokenizer.json")
    assert not file.exists()
