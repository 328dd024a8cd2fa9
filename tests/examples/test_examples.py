"""Every example runs, stays short, and prints what it claims."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "examples"
#: Modules that other examples import.
HELPERS = {"small_model", "toy_language", "measured"}
#: An example, and text that its output contains.
EXPECTED = {
    "attention_dropin": ["refused: attn_mask is not supported", "attention: True"],
    "beam_search": ["greedy     0.076", "width 4    0.222", "every token needs a page ."],
    "cache_basics": ["a: 3, b: 7", "rows 0, 1 and 6: True"],
    "cache_memory": ["latent", "layers slide", "all heads", "grouped heads", "compute"],
    "cached_attention": ["saves 43 times", "512             1,048,576"],
    "continuous_batching": ["96 tokens in", "120; padded to the longest: 480", "alone: True"],
    "draft_tree": ["│  ├─ drafter ✓", "accepted: . every token needs + a"],
    "flash_attention": ["peak MiB"],
    "full_generation": ["seed 1 again"],
    "kv_cache_strategies": ["| dense | 32.00 | 0.00% | 0.00% |"],
    "layer_norm_stability": ["centred"],
    "paged_cache": ["dense          2720  True", "4.7 times less"],
    "ternary_training": ["ternary, packed", "logits of its dense copy: True"],
    "softmax_topk": ["ties go to the lower index: [0, 1, 2]"],
}
OUTPUTS = {}
EXAMPLES = {path.stem for path in FOLDER.glob("*.py")} - HELPERS


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs an example as a script, once per process; its own folder comes first on the path."""

    def run(name, *args):
        if not args and name in OUTPUTS:
            return OUTPUTS[name]
        script = FOLDER / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, args)])
        monkeypatch.syspath_prepend(str(FOLDER))
        runpy.run_path(str(script), run_name="__main__")
        OUTPUTS[name] = capsys.readouterr().out
        return OUTPUTS[name]

    return run


@pytest.mark.parametrize("name", EXPECTED)
def test_example_prints_what_it_claims(name, run):
    if name == "attention_dropin":
        pytest.importorskip("transformers")
    out = run(name)
    assert "False" not in out
    for text in EXPECTED[name]:
        assert text in out


def test_every_example_is_tested_and_listed():
    own_tests = {
        path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")
    }
    assert {*EXPECTED} | own_tests - {"examples"} == EXAMPLES
    listed = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in listed for name in EXAMPLES | HELPERS)


@pytest.mark.parametrize("name", sorted(EXAMPLES | HELPERS))
def test_example_has_at_most_sixty_lines(name):
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60


def test_same_seed_gives_the_same_tokens(run):
    said = {line[:22].strip(): line[22:].split() for line in run("full_generation").splitlines()}
    assert said["sampled, seed 1"] == said["sampled, seed 1 again"]
    assert said["sampled, seed 1"] != said["sampled, seed 2"]


def test_cached_attention_differs_by_rounding_only(run):
    lines = [line.split() for line in run("cached_attention").splitlines()]
    differences = [float(line[-1]) for line in lines if line and line[0].isdigit()]
    assert len(differences) == 12
    assert max(differences) < 1e-12


def test_larger_trees_give_more_words_per_pass(run):
    table = run("draft_tree").split("words per pass of the target\n")[1]
    rates = [float(line.split()[1]) for line in table.splitlines()]
    assert 1 < rates[0] < rates[1] < rates[2] < rates[3] < 5


def test_flash_attention_needs_less_memory_than_naive(run):
    rows = [line.split() for line in run("flash_attention").splitlines()[1:]]
    memory = {(int(row[0]), row[1]): float(row[3]) for row in rows}
    assert memory[2048, "flash"] < 0.25 * memory[2048, "naive"]
    assert all(float(value) < 1e-4 for row in rows for value in row[5::2])


def test_softmax_topk_is_exact_where_the_naive_way_overflows(run):
    rows = {line.split()[0]: line.split() for line in run("softmax_topk").splitlines() if line}
    assert rows["naive"][-1] == "inf"
    assert float(rows["library"][-1]) < 1e-6
    assert float(rows["library"][2]) < float(rows["torch_functions"][2])


def test_fewer_bits_cost_more_and_calibration_helps(run):
    table = [line.strip("|").split("|") for line in run("kv_cache_strategies").splitlines()[2:]]
    bits = {name.strip(): float(bits) for name, bits, *_ in table}
    normal = {row[0].strip(): float(row[2].strip(" %")) for row in table}
    outlying = {row[0].strip(): float(row[3].strip(" %")) for row in table}
    assert 8 < bits["paged int8"] <= 8.5
    assert max(bits["paged int4"], bits["paged int4, calibrated"]) <= 4.6
    assert max(normal["dense"], normal["paged"]) < 1e-3
    assert normal["paged int8"] < normal["paged fp8"] < normal["paged int4"]
    assert outlying["paged int4, calibrated"] < 0.3 * outlying["paged int4"]


def test_naive_variance_cancels_and_the_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "stability.png"
    lines = [line.split() for line in run("layer_norm_stability", "--out", out).splitlines()]
    (line,) = [line for line in lines if line and line[0] == "1e+10"]
    assert line[1:3] == ["0.000", "2.000"]
    assert out.read_bytes().startswith(b"\x89PNG")
