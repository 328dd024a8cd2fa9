"""`trapline memory` on the command line."""

import json
import os
import subprocess
import sys

import huggingface_hub
import pytest
from typer.testing import CliRunner

from trapline.arena.errors import UsageError
from trapline.cli.main import build
from trapline.gold.kv_cache.shapes import models


def run(*args, columns=200):
    return CliRunner().invoke(build("memory"), ["memory", *args], env={"COLUMNS": str(columns)})


def test_one_json_object():
    result = run("llama-2-7b", "--gpu", "H100-80", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["setting"]["utilization"] == 0.9
    assert [one["gpu"] for one in answer["answers"]] == ["h100-80"]
    assert 121_000 < answer["answers"][0]["tokens"] < 122_000


def test_the_table_names_every_convention():
    result = run("gemma-3-27b", "--gpu", "t4", "--gpu", "h200", "--unit", "gb")
    assert result.exit_code == 0
    for words in ("1 GB = 1,000,000,000", "reserve 0 GiB", "pages of 16", "for full windows"):
        assert words in result.stdout


def test_weights_that_do_not_fit_say_how_much_is_missing():
    result = run("llama-3.1-405b", "--gpu", "h200")
    assert result.exit_code == 0
    assert "629.06 short" in result.stdout


def test_without_a_model_it_lists():
    result = run()
    assert result.exit_code == 0
    assert "deepseek-v3" in result.stdout
    assert "rtx-4090" in result.stdout
    listed = json.loads(run("--json").stdout)
    assert len(listed["models"]) >= 20
    assert len(listed["gpus"]) >= 12


def test_names_are_whole_on_a_narrow_terminal():
    listed = run(columns=80).stdout
    for name in models():
        assert name in listed, name


def test_figures_are_whole_in_a_narrow_place():
    asked = ("llama-3.1-8b", "--prompt", "90000", "--new", "10000", "--sequences", "16")
    for gpus in (("--gpu", "a100-80", "--gpu", "h200"), ()):
        narrow, wide = (run(*asked, *gpus, columns=n).stdout for n in (50, 300))
        assert "…" not in narrow
        cells = [cell for line in wide.splitlines() if line[:1] == "│" for cell in line.split("│")]
        assert len(cells) > 10
        for cell in cells:
            assert cell.strip() in narrow
    assert "…" not in run(columns=50).stdout


def test_tokens_beyond_the_context_are_named():
    asked = ("gpt2-xl", "--gpu", "h100-80", "--prompt")
    said = "5,005 tokens are beyond the model's context of 1,024."
    assert said in run(*asked, "5000", "--new", "5").stdout.splitlines()
    assert "beyond" not in run(*asked, "1019", "--new", "5").stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--plot", "x.png"), "--plot needs a model"),
        (("--gpu", "h100-80"), "--gpu needs a model"),
        (("--kv-bits", "nan"), "--kv-bits needs a model"),
        (("--json", "--new", "100"), "--new needs a model"),
        (("no-such-model",), "unknown model 'no-such-model'; there are: gpt2-xl"),
        (("llama-4-8b",), "similar names: llama-3"),
        (("llama-2-7b", "--gpu", "abacus"), "there are: t4"),
        (("llama-2-7b", "--utilization", "90"), "utilization"),
        (("llama-2-7b", "--unit", "kg"), "gib or gb"),
        (("llama-2-7b", "--new", "0"), "at least 1"),
        (("llama-2-7b", "--kv-bits", "nan"), "bits must be 0.01 to 1024, got nan"),
        (("llama-2-7b", "--weight-bits", "inf"), "bits must be 0.01 to 1024, got inf"),
        (("llama-2-7b", "--weight-bits", "1e300"), "bits must be 0.01 to 1024"),
        (("deepseek-v3", "--kv-bits", "1e-320"), "bits must be 0.01 to 1024"),
        (("llama-2-7b", "--reserve-gib", "1e300"), "the reserve must be 0 to 1000000 GiB"),
        (("llama-2-7b", "--prompt", "1" + 44 * "0"), "added up to 20,000,000 positions"),
        (("llama-2-7b", "--new", "2000000000"), "added up to 20,000,000 positions"),
        (("llama-2-7b", "--reserve-gib", "inf"), "the reserve"),
        (("llama-2-7b", "--reserve-gib", "nan"), "the reserve"),
        (("llama-2-7b", "--plot", "no-such-folder/plot.png"), "cannot write"),
    ],
)
def test_what_makes_no_sense_is_refused(args, says):
    result = run(*args)
    assert isinstance(result.exception, UsageError)
    assert says in str(result.exception)


def test_a_checkpoint_folder_and_a_hub_id(tmp_path, monkeypatch):
    """Known names need no network; of other ids only the configuration is fetched."""
    raw = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96}
    raw |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    asked = []
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda *given: asked.append(given) or str(tmp_path / "config.json"),
    )
    for name in (str(tmp_path), "org/unknown"):
        found = json.loads(run(name, "--gpu", "t4", "--json").stdout)
        assert found["model"]["layers"] == 3
        assert found["answers"][0]["bytes_per_token"] == 2 * 3 * 64 * 2
    assert run("meta-llama/Meta-Llama-3-8B", "--gpu", "h200").exit_code == 0
    assert asked == [("org/unknown", "config.json")]

    def offline(*given):
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    result = run("org/unknown")
    assert isinstance(result.exception, UsageError)
    assert "unknown model 'org/unknown'; there are: gpt2-xl" in str(result.exception)
    assert "org/unknown is not a path of this machine" in str(result.exception)


def test_what_a_cache_saves_and_how_long_an_answer_takes():
    result = run("llama-2-7b", "--gpu", "h100-80", "--gpu", "t4")
    assert "109.3 × if every step is charged at the final length" in result.stdout
    assert "arithmetic-bound from" in result.stdout
    answer = json.loads(run("llama-2-7b", "--gpu", "h100-80", "--json").stdout)
    assert round(answer["saved"]["scores_at_final_length"]) == 109
    (found,) = answer["answers"]
    assert found["latency"]["decode_milliseconds"] > found["latency"]["prefill_milliseconds"]
    assert found["step"]["memory_bound"]


def test_growth_can_be_plotted(tmp_path):
    out = tmp_path / "growth.png"
    assert run("gemma-3-27b", "--gpu", "h200", "--plot", str(out)).exit_code == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_help_has_an_example():
    assert "Example: trapline memory" in run("--help").stdout


def test_a_terminal_without_our_signs_gets_question_marks():
    command = [sys.executable, "-m", "trapline"]
    done = subprocess.run(
        [*command, "memory", "llama-2-7b", "--gpu", "t4"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert b"109.3 ? if every step" in done.stdout
