"""What the tests of several verbs share."""

import sys
from typing import NamedTuple

import pytest

from trapline.cli.main import build, guarded, main


class Done(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def trapline(tmp_path, monkeypatch, capsys):
    """The program in this process (a start costs more than most verbs), in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["trapline", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def saved_decoder(tmp_path_factory):
    """Makes small decoders of random weights; gives the folder of a checkpoint, and the decoder."""
    import torch

    from trapline.gold.decoder.api import Decoder
    from trapline.gold.decoder.config import from_dict

    def save(**sizes):
        torch.manual_seed(3)
        fixed = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 8}
        fixed |= {"num_attention_heads": 2, "max_position_embeddings": 64}
        decoder = Decoder(from_dict(fixed | sizes)).requires_grad_(False)
        folder = tmp_path_factory.mktemp("checkpoint")
        decoder.save_pretrained(folder)
        return folder, decoder

    return save


@pytest.fixture
def run(capsys):
    """`trapline generate` in this process, with what turns our errors into a sentence and a code.

    Gives the exit code, what was printed, and what was told on one line.
    """

    def run(*args):
        app = build()
        code = None
        try:
            guarded(lambda: app(["generate", *map(str, args)], prog_name="trapline"))
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return code, said.out, " ".join(said.err.split())

    return run
