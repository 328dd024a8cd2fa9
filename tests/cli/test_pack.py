"""`trapline pack`: targets it must not replace, options that say nothing, files of others."""

import os
import shutil
import stat

import pytest
import torch
from typer.testing import CliRunner

from trapline.arena.errors import UsageError
from trapline.cli.main import build
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.ternary.layers import convert, dequantized
from trapline.gold.ternary.packed_model import pack_model, save_packed

SHAPE = {
    "model_type": "llama", "vocab_size": 20, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same weights dense and packed, in groups of 16."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("checkpoints")
    model = Decoder(from_dict(SHAPE)).eval()
    convert(model, 16)
    dequantized(model).save_pretrained(folder / "dense")
    save_packed(pack_model(model), folder / "packed")
    return folder


def pack(*args):
    return CliRunner().invoke(build(), ["pack", *map(str, args)])


def refused(*args):
    """What is said of a misuse."""
    error = pack(*args).exception
    assert isinstance(error, UsageError), error
    return str(error)


def test_what_is_no_regular_file_is_not_replaced(checkpoints, tmp_path):
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert "not a regular file" in refused(checkpoints / "packed", pipe, "--format", "f16")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize(("form", "name"), [("packed", "out"), ("f16", "out.gguf")])
def test_a_packed_model_knows_its_groups(checkpoints, tmp_path, form, name):
    source, out = checkpoints / "packed", tmp_path / name
    said = refused(source, out, "--format", form, "--group-size", 7)
    assert "--group-size" in said
    assert "dense" in said
    assert not out.exists()
    assert pack(source, out, "--format", form).exit_code == 0


def test_a_dense_model_is_told_its_groups(checkpoints, tmp_path):
    source, out = checkpoints / "dense", tmp_path / "out"
    assert "groups of 128" in refused(source, out)
    assert pack(source, out, "--group-size", 16).exit_code == 0


def test_a_dense_model_is_not_replaced(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "dense", tmp_path / "mine")
    before = (tmp_path / "mine" / "model.safetensors").read_bytes()
    assert "holds no packed model" in refused(checkpoints / "packed", tmp_path / "mine")
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == before


def test_a_file_of_the_checkpoint_is_no_gguf_file(checkpoints, tmp_path):
    shutil.copytree(checkpoints / "packed", tmp_path / "mine")
    config = tmp_path / "mine" / "config.json"
    before = config.read_text()
    said = refused(tmp_path / "mine", config, "--format", "f16")
    assert said == f"{config} is not the name of a GGUF file: it must end in .gguf"
    assert config.read_text() == before


def test_words_that_are_none_are_a_sentence(checkpoints, tmp_path):
    (checkpoints / "dense" / "tokenizer.json").write_text("[]")
    given = (checkpoints / "dense", tmp_path / "m.gguf", "--format", "f16", "--group-size", 16)
    assert "is not a byte-level BPE tokeniser" in refused(*given)
    assert not list(tmp_path.iterdir())
