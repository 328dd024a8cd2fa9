"""Every example runs, and its table says what it claims."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "examples"
#: A script, and what must stand in its output.
SAYS = {
    "attention_dropin": ["refused: attn_mask is not supported", "attention: True"],
    "cache_basics": ["a: 3, b: 7", "rows 0, 1 and 6: True"],
    "cached_attention": ["saved 43 times"],
    "full_generation": ["seed 1 again", "beam, score"],
    "ragged_batch": ["prompts: 56; padded to the longest: 160"],
    "paged_cache": ["dense          2720  yes", "times less"],
    "quantised_cache": ["int8", "int4"],
    "chunked_prefill": ["512             1,048,576"],
    "memory_growth": ["latent", "layers slide", "all heads", "grouped heads"],
    "arithmetic_intensity": ["memory", "compute"],
    "continuous_batching": ["96 tokens in", "what they get alone: True"],
}


@pytest.fixture
def run(capsys, monkeypatch):
    """In this process, as the script it is: its folder comes first when it imports."""

    def run(name):
        script = FOLDER / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script)])
        monkeypatch.syspath_prepend(str(FOLDER))
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs_and_says_what_it_claims(name, run):
    if name == "attention_dropin":
        pytest.importorskip("transformers")
    out = run(name)
    assert "NO" not in out
    assert "False" not in out
    for sentence in SAYS[name]:
        assert sentence in out


def test_every_example_is_tested():
    """Here, or in a file of its own; a module that others import needs none."""
    tested = {*SAYS, "small_model"}
    tested |= {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert {path.stem for path in FOLDER.glob("*.py")} <= tested


def rows(out):
    return {line.split("  ")[0].strip(): line.split() for line in out.splitlines()}


def test_the_same_seed_gives_the_same_tokens(run):
    said = {line[:22].strip(): line[22:].split() for line in run("full_generation").splitlines()}
    assert said["sampled, seed 1"] == said["sampled, seed 1 again"]
    assert said["sampled, seed 1"] != said["sampled, seed 2"]


@pytest.mark.parametrize("name", ["cached_attention", "chunked_prefill"])
def test_the_differences_are_of_rounding(name, run):
    lines = [line.split() for line in run(name).splitlines()]
    differences = [float(line[-1]) for line in lines if line and line[0].isdigit()]
    assert len(differences) >= 5
    assert max(differences) < 1e-12


def test_fewer_bits_take_less_and_cost_more(run):
    found = rows(run("quantised_cache"))
    bits = {name: float(found[name][-2]) for name in ("as it is", "int8", "fp8", "int4")}
    error = {name: float(found[name][-1]) for name in bits}
    assert bits["as it is"] > 30
    assert 8 < bits["int8"] <= 8.5
    assert 4 < bits["int4"] <= 4.6
    assert error["as it is"] < error["int8"] < error["fp8"] < error["int4"]
