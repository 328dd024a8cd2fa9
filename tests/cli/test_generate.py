"""`trapline generate` on a small random checkpoint with a byte-level tokenizer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trapline.cli.exit_codes import PIPE_CLOSED
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.sampling import Sampling


@pytest.fixture(scope="module")
def checkpoint(saved_decoder):
    folder, decoder = saved_decoder(vocab_size=256, num_hidden_layers=1)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return folder, decoder, made


def installed(folder, count):
    """The installed command that continues the ids 1 2 3."""
    program = str(Path(sys.executable).with_name("trapline"))
    options = ["--model", str(folder), "--ids", "--max-new-tokens", str(count)]
    return [program, "generate", "1 2 3", *options]


def test_the_installed_command_streams_ids(checkpoint):
    folder, decoder, _ = checkpoint
    command = installed(folder, 5)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ})
    expected = generate(decoder, [[1, 2, 3]], max_new_tokens=5)[0]
    assert done.stdout.split() == [str(token) for token in expected]
    said = r"5 tokens, the first after \d+\.\d s, then \d+\.\d a second\n"
    assert re.fullmatch(said, done.stderr), done.stderr


def test_a_closed_pipe_is_not_a_usage_error(checkpoint):
    """As with `| head`: no message, and not the exit code of a usage error."""
    folder, *_ = checkpoint
    command = installed(folder, 40)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        running.stdout.close()
        said = running.stderr.read()
    assert (running.returncode, said) == (PIPE_CLOSED, "")


def test_a_full_disk_is_not_a_usage_error(checkpoint):
    folder, *_ = checkpoint
    command = installed(folder, 4)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_text_is_continued_up_to_a_stop_string(checkpoint, run):
    folder, decoder, words = checkpoint
    prompt = words.encode("hello").ids
    expected = words.decode(generate(decoder, [prompt], max_new_tokens=12)[0])
    code, out, _ = run("hello", "--model", folder, "--max-new-tokens", 12)
    assert (code, out) == (0, expected + "\n")
    cut = expected[3:5]
    code, out, _ = run("hello", "--model", folder, "--max-new-tokens", 12, "--stop", cut)
    assert (code, out) == (0, expected[: expected.index(cut)] + "\n")


def test_a_seed_gives_the_same_text_again(checkpoint, run):
    folder, *_ = checkpoint
    drawn = ("1 2", "--model", folder, "--ids", "--temperature", 1.5, "--max-new-tokens", 9)
    first, again, other = (run(*drawn, "--seed", seed)[1] for seed in (4, 4, 5))
    assert first == again != other


def test_beams_are_listed_with_their_scores(checkpoint, run):
    folder, *_ = checkpoint
    ends = ("--eos-id", 4, "--eos-id", 7)
    _, out, err = run("1 2", "--model", folder, "--ids", "--beams", 3, *ends, "--max-new-tokens", 9)
    scores = [float(line.split()[0]) for line in out.splitlines()]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert "a second" in err


def test_bias_and_penalties_reach_the_model(checkpoint, run):
    folder, decoder, _ = checkpoint
    way = Sampling(repetition_penalty=1.5, presence_penalty=0.2, logit_bias={7: 3.0, 8: -2.0})
    options = ("--repetition-penalty", "1.5", "--presence-penalty", "0.2")
    bias = ("--logit-bias", "7=3", "--logit-bias", "8=-2")
    given = ("1 2 3", "--ids", "--model", folder, "--max-new-tokens", "9", *options, *bias)
    code, out, _ = run(*given)
    expected = generate(decoder, [[1, 2, 3]], max_new_tokens=9, sampling=way)[0]
    assert (code, out.split()) == (0, [str(token) for token in expected])
    code, out, _ = run(*given, "--beams", "2", "--eos-id", "0")
    best = decoder.generate([1, 2, 3], max_new_tokens=9, sampling=way, beams=2, stop_ids=[0])
    assert code == 0
    assert out.splitlines()[0].split()[1:] == [str(token) for token in best[0].tokens]


BAD = [
    (("1", "--ids"), "nowhere", "config.json"),
    (("1",), "nowhere", "no such folder or file"),
    (("one", "--ids"), "", "token ids, such as '5 6 7'; got 'one'"),
    (("", "--ids"), "", "prompt is empty"),
    (("999", "--ids"), "", "outside the vocabulary"),
    (("1", "--ids", "--eos-id", "999"), "", "stop token 999"),
    (("1", "--ids", "--max-new-tokens", "64"), "", "the model has 64"),
    (("1", "--ids", "--beams", "2"), "", "--eos-id"),
    (("1", "--ids", "--beams", "0"), "", "greater than or equal to 1"),
    (("1", "--ids", "--top-p", "2"), "", "top_p"),
    (("1", "--ids", "--stop", ""), "", "cannot be empty"),
    (("1", "--ids", "--device", "abacus"), "", "is not one of"),
    (("1", "--ids", "--beams", "2", "--temperature", "1"), "", "leave --temperature out"),
    (("1", "--ids", "--beams", "2", "--seed", "3"), "", "does not sample: leave --seed out"),
    (("1", "--ids", "--beams", "2", "--top-k", "4"), "", "does not sample: leave --top-k out"),
    (("1", "--ids", "--beams", "2", "--stop", "5"), "", "not at --stop"),
    (("1", "--ids", "--policy", "hf"), "", "add --beams"),
    (("1", "--ids", "--length-penalty", "2"), "", "add --beams"),
    (("1", "--ids", "--top-p", "0.5"), "", "add --temperature"),
    (("1", "--ids", "--top-k", "5"), "", "add --temperature"),
    (("1", "--ids", "--seed", "0"), "", "--seed need sampling: add --temperature"),
    (("1", "--ids", "--chat"), "", "--chat takes text: leave --ids out"),
    (("1", "--chat"), "", "has no chat template"),
    (("1", "--ids", "--logit-bias", "5"), "", "must be TOKEN=VALUE, such as 42=-5, got 5"),
    (("1", "--ids", "--logit-bias", "999=1"), "", "logit_bias token 999 is outside"),
    (("1", "--ids", "--repetition-penalty", "0"), "", "must be positive, got 0"),
    (("1", "--ids", "--budget", "4"), "", "add --speculate"),
    (("1", "--ids", "--budget", "32"), "", "add --speculate"),
    (("1", "--ids", "--drafter", "d"), "", "--drafter needs --speculate"),
    (("1", "--ids", "--speculate", "lookup", "--drafter", "d"), "", "--drafter needs --speculate"),
]


@pytest.mark.parametrize(("arguments", "place", "sentence"), BAD)
def test_bad_input_is_refused_with_a_sentence(checkpoint, run, arguments, place, sentence):
    folder, *_ = checkpoint
    code, _, err = run(*arguments, "--model", folder / place)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


def test_a_broken_checkpoint_is_a_usage_error(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code, _, err = run("1", "--model", tmp_path, "--ids")
    assert code == 2
    assert "has no 'num_attention_heads'" in err


def test_a_missing_device_is_reported(checkpoint, run, monkeypatch):
    folder, *_ = checkpoint
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = run("1", "--model", folder, "--ids", "--device", "cuda")
    assert code == 3
    assert "no CUDA device" in err


def test_without_a_model_the_demo_model_answers(run):
    code, out, err = run("The kernel", "--max-new-tokens", 4)
    assert code == 0
    assert out.strip()
    assert "4 tokens, " in err
    assert "a second" in err
