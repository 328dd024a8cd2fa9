"""`trapline train` and `trapline pack` as a user meets them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trapline.arena.errors import InterruptedRunError, MissingError
from trapline.cli.main import build
from trapline.cli.train import train
from trapline.gold.decoder.api import Decoder

WORDS = ("river", "stone", "light", "market", "window", "garden", "winter", "letter")
SIZES = ["--vocab", 280, "--dim", 32, "--layers", 1, "--heads", 2, "--context", 12]
SHORT = ["--batch", 2, "--held-out", 0.2, "--steps", 4, "--evaluate-every", 2, "--device", "cpu"]


@pytest.fixture
def run(trapline, monkeypatch):
    """The program in this process, with lines that hold a sentence."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return trapline


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = [f"the {WORDS[n % 8]} saw the {WORDS[n * 3 % 7]} and said {n}." for n in range(60)]
    path.write_text("\n\n".join(lines))
    return path


def test_train_pack_and_bad_input(run, text, tmp_path):
    own = ["--learn-scales", "--latent-decay", 0.3, "--soft", 0.5, "--no-tied"]
    own += ["--matrices", 1.5]
    done = run("train", text, "--out", tmp_path / "run", *SIZES, *SHORT, *own)
    assert done.returncode == 0, done.stderr
    recipe = json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]
    assert (recipe["latent_decay"], recipe["matrices"]) == (0.3, 1.5)
    assert "best held-out loss" in done.stdout
    assert "tokens to learn from" in done.stderr
    assert "feedforward.down.weight" in done.stderr
    for name in ("model", "packed"):
        model = tmp_path / "run" / name
        done = run("generate", "the river", "--model", model, "--max-new-tokens", 3)
        assert done.returncode == 0, done.stderr
    done = run("pack", tmp_path / "run" / "packed", tmp_path / "small.gguf", "--format", "f16")
    assert done.returncode == 0, done.stderr
    assert "bytes" in done.stdout
    assert Decoder.from_pretrained(tmp_path / "small.gguf").config.vocab == 280
    done = run("pack", tmp_path / "run" / "packed", tmp_path / "run", "--format", "f16")
    assert done.returncode == 2
    assert "is a folder; GGUF is a file" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere.txt"], "cannot be read"),
        (["TEXT", "--vocab", 100], "at least 257"),
        (["TEXT", "--resume"], "to resume from"),
        (["TEXT", "--method", "nope"], "'nope' is not one of"),
        (["TEXT", "--rate", -1], "Invalid value for '--rate'"),
        (["TEXT", "--dense", "--learn-scales"], "--learn-scales is for ternary weights"),
        (["TEXT", "--weight-decay", 0.1], "--weight-decay is for dense weights"),
        (["TEXT", "--schedule", "constant", "--final-rate", 0.01], "--final-rate is never reached"),
        (["TEXT", "--matrices", "inf"], "matrices must be finite"),
        (["TEXT", "--distill", 0.9], "add --teacher"),
    ],
)
def test_bad_input_is_one_sentence(run, text, tmp_path, arguments, sentence):
    given = [text if one == "TEXT" else one for one in arguments]
    done = run("train", *given, "--out", tmp_path / "run", *SHORT)
    assert done.returncode == 2, done.stderr
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_interrupted_run_says_how_to_continue(text, tmp_path):
    out = tmp_path / "run"
    endless = ["train", text, "--out", out, *SIZES, *SHORT, "--steps", 100_000, "--patience", 0]
    program = str(Path(sys.executable).with_name("trapline"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        [program, *map(str, endless)], env=environment, stderr=subprocess.PIPE, text=True
    ) as running:
        began = time.monotonic()
        while not (out / "last.pt").exists() and time.monotonic() < began + 120:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        said = running.communicate(timeout=120)[1]
    assert running.returncode == 130, said
    assert "the same command with --resume goes on" in " ".join(said.split())


def test_run_interrupted_before_its_first_checkpoint_starts_over(text, tmp_path, monkeypatch):
    def interrupted(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr("trapline.cli.train._run", interrupted)
    asked = ["train", str(text), "--out", str(tmp_path / "run"), *map(str, SHORT)]
    with pytest.raises(InterruptedRunError) as told:
        CliRunner().invoke(build(), asked, catch_exceptions=False)
    assert told.value.then == "nothing is kept, the same command begins anew"


def test_a_gpu_that_is_not_there_is_missing(text, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingError, match="no CUDA device"):
        train(None, [text], tmp_path / "run", device="cuda")


def test_a_checkpoint_brings_its_sizes_and_its_end(run, text, tmp_path):
    first = tmp_path / "first"
    done = run("train", text, "--out", first, *SIZES, *SHORT, "--dense")
    assert done.returncode == 0, done.stderr
    model = first / "model"
    # As a foreign checkpoint would: its end is a token of its own.
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    more = ("--start", model, *SHORT)
    done = run("train", text, "--out", tmp_path / "other", "--dim", 64, *more)
    assert done.returncode == 2
    assert "has dim 32, asked for is 64" in " ".join(done.stderr.split())
    done = run("train", text, "--out", tmp_path / "second", *more, "--context", 12)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "second" / "run.json").read_text())
    assert summary["shape"]["dim"] == 32
    for name in ("model", "packed"):
        said = (tmp_path / "second" / name / "generation_config.json").read_text()
        assert json.loads(said)["eos_token_id"] == [7, 9]
