"""`save_pretrained`: what is loaded again computes the same, in every form that weights have."""

import json

import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.errors import RangeError
from trapline.gold.ternary.layers import convert
from trapline.gold.ternary.packed_model import pack_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 20,
    "hidden_size": 48,
    "intermediate_size": 136,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def ternary_decoder(*, tied=True):
    torch.manual_seed(5)
    made = Decoder(from_dict({**SHAPE, "tie_word_embeddings": tied})).eval()
    convert(made)
    return made.requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_decoder_is_saved_packed(tmp_path, tied):
    decoder = pack_model(ternary_decoder(tied=tied))
    expected = decoder(IDS)
    decoder.save_pretrained(tmp_path)
    again = Decoder.from_pretrained(tmp_path)
    assert torch.equal(again(IDS), expected)
    again.save_pretrained(tmp_path)  # onto the files that it was loaded from
    assert torch.equal(Decoder.from_pretrained(tmp_path)(IDS), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_packed_decoder_replaces_shards(tmp_path, make):
    make("llama").save_pretrained(tmp_path, shard_bytes=3000)
    packed = pack_model(ternary_decoder())
    packed.save_pretrained(tmp_path)
    assert torch.equal(Decoder.from_pretrained(tmp_path)(IDS), packed(IDS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_converted_decoder_is_saved_as_it_computes(tmp_path):
    """Not with its latent weights, which are another model."""
    decoder = ternary_decoder()
    decoder.save_pretrained(tmp_path)
    torch.testing.assert_close(Decoder.from_pretrained(tmp_path)(IDS), decoder(IDS))


def test_partly_packed_decoders_are_refused_and_write_nothing(tmp_path):
    decoder = pack_model(ternary_decoder(tied=False))
    decoder.head = torch.nn.Linear(48, 20, bias=False)
    with pytest.raises(RangeError, match="head is dense"):
        decoder.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_matrices_are_refused_and_write_nothing(tmp_path, make):
    decoder = make("llama")
    decoder.layers[0].attention.q = torch.nn.Identity()
    with pytest.raises(RangeError, match=r"layers\.0\.attention\.q\.weight is not a dense weight"):
        decoder.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_special_tokens_are_saved(tmp_path, packed):
    special = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    decoder = Decoder(from_dict({**SHAPE, **special})).eval()
    if packed:
        convert(decoder)
        pack_model(decoder)
    decoder.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in special} == special
    again = Decoder.from_pretrained(tmp_path)
    assert again.config == decoder.config
    assert again.stop_ids == [2, 0]


def test_stop_tokens_that_the_configuration_does_not_name_are_saved(tmp_path, make):
    decoder = make("llama", eos_token_id=2)
    decoder.save_pretrained(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()
    decoder.stop_ids = [2, 5]
    decoder.save_pretrained(tmp_path)
    assert Decoder.from_pretrained(tmp_path).stop_ids == [2, 5]


def test_a_failed_write_leaves_the_checkpoint_as_it_was(tmp_path, make, monkeypatch):
    decoder = make("llama")
    decoder.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trapline.gold.decoder.weights.save_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        make("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_other_files_of_the_folder_stay(tmp_path, make):
    (tmp_path / "tokenizer.json").write_text("{}")
    make("llama").save_pretrained(str(tmp_path))
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
