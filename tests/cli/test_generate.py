"""`trapline generate` on a small random checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.model import Decoder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    shape = {"model_type": "llama", "vocab_size": 11, "hidden_size": 16, "intermediate_size": 8}
    decoder = Decoder(from_dict({**shape, **sizes}))
    folder = tmp_path_factory.mktemp("checkpoint")
    decoder.save_pretrained(folder)
    return folder, decoder


def run(*args):
    program = Path(sys.executable).with_name("trapline")
    command = [str(program), "generate", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_greedy_beams_and_bad_input(checkpoint):
    folder, decoder = checkpoint
    done = run("1 2 3", "--model", folder, "--ids", "--max-new-tokens", 5)
    expected = generate(decoder, [[1, 2, 3]], max_new_tokens=5)[0]
    assert done.stdout.split() == [str(token) for token in expected]
    assert "tokens" in done.stderr
    done = run(
        "1 2", "--model", folder, "--ids", "--beams", 3, "--eos-id", 4, "--max-new-tokens", 4
    )
    assert len(done.stdout.splitlines()) == 3
    for arguments, sentence in (
        (("1", "--model", folder / "nowhere", "--ids"), "config.json"),
        (("1", "--model", folder), "tokenizer.json"),
        (("one", "--model", folder, "--ids"), "integers"),
        (("99", "--model", folder, "--ids", "--max-new-tokens", 3), "outside the vocabulary"),
        (("1", "--model", folder, "--ids", "--beams", 2), "--eos-id"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done.stderr
        assert sentence in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
