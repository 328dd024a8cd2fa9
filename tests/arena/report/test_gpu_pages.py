"""Pages of a GPU run, from a cell that an H200 graded (its clocks and kernels were added)."""

import json
from pathlib import Path

import pytest

from trapline.arena.record import Bundle, Cell, Dimension, Finding
from trapline.arena.report.pages import gpu
from trapline.arena.report.runview import RunView
from trapline.arena.report.site import write_site
from trapline.arena.runs.store import canonical, digest

RECORDED = json.loads((Path(__file__).parent / "gpu_cell.json").read_text())
LOG = "ptxas info    : Used 40 registers, 8192 bytes smem <&>"
REFUSED = "raised CompileError: solution.cu(3): error: identifier FLT_MAX is undefined"


def slower(factor):
    speed = json.loads(json.dumps(RECORDED["dimensions"]["speed"]))
    for row in speed["evidence"]["shapes"]:
        row["seconds"] *= factor
        row["kernels"] = {"<b>laundered</b> gemm": 1.0}
    return Dimension.model_validate(speed)


def bundled(cell, files, raw):
    bundle = Bundle(cell=cell, files=files, raw=raw)
    return cell.model_copy(update={"bundle": digest(canonical(bundle))}), bundle


def test_kernels_are_named_without_their_arguments():
    said = {
        "void fwd<float>(float const*, int)": 0.5,
        "void at::(anonymous namespace)::f(int)": 0.5,
    }
    assert gpu._by_name(said) == {"fwd<float>": 0.5, "at::f": 0.5}


@pytest.fixture(scope="module")
def run():
    gold = Cell.model_validate(RECORDED)
    found = Finding(
        cause="rows-beyond-65535",
        certainty="confirmed",
        severity="critical",
        sentence="The rows are a grid dimension that ends at 65535.",
        explains=["rows-beyond-65535"],
        call="softmax_topk(float32[70000, 4] from -1 to 1, 2)",
    )
    cuda = gold.model_copy(
        update={
            "entrant": "cuda",
            "findings": [found],
            "dimensions": {**gold.dimensions, "speed": slower(2.0)},
        }
    )
    refused = gold.model_copy(
        update={
            "entrant": "refused",
            "state": "fail",
            "score": 0.0,
            "letter": "F",
            "reason": f"cannot be imported: {REFUSED}",
            "dimensions": {"speed": Dimension(score=0.0, reason=REFUSED)},
        }
    )
    made = [
        bundled(gold, {"solution.py": "import torch\n"}, {}),
        bundled(cuda, {"solution.cu": "int x;\n", "notes.md": "a\n"}, {"compile log": LOG}),
        bundled(refused, {"solution.cu": "int y;\n"}, {"compile log": REFUSED}),
    ]
    return RunView(cells=[c for c, _ in made], bundles={c.bundle: b for c, b in made}, name="gpu")


@pytest.fixture(scope="module")
def site(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu-site")
    write_site(run, folder)
    return folder


def page(site, *parts):
    (found,) = [path for path in site.rglob("*.html") if all(part in str(path) for part in parts)]
    return found.read_text()


def test_challenge_page_has_the_roofline_and_the_speed_of_every_shape(site):
    text = page(site, "challenges/", "fused_softmax_topk")
    assert 'aria-label="Roofline of 6 times on 3 shapes"' in text
    assert "Speed by shape" in text
    for row in RECORDED["dimensions"]["speed"]["evidence"]["shapes"]:
        assert row["shape"] in text
    for told in ("speed of light", "torch's best", "548 (12 %)", "1,097 (6 %)"):
        assert told.replace("'", "&#39;") in text


def test_overview_has_the_roofline_of_all_answers(site):
    text = (site / "index.html").read_text()
    assert 'aria-label="Roofline of 6 times on 3 shapes"' in text
    assert text.count("bfloat16 product") == 1


def test_challenge_page_is_of_the_gpu_track(site):
    text = page(site, "challenges/", "fused_softmax_topk")
    assert "in CUDA C++ or in Triton" in text  # the prompt
    assert "rows-beyond-65535" in text  # its traps


def test_cell_page_shows_times_kernels_and_the_log(site):
    text = page(site, "cells/", "cuda")
    for told in ("On the GPU", "graph replay", "NVIDIA H200", "SM clock 1980 MHz"):
        assert told in text
    assert "&lt;b&gt;laundered&lt;/b&gt; gemm" in text
    assert "a label, not a measure" in text
    assert "Used 40 registers, 8192 bytes smem &lt;&amp;&gt;" in text
    assert "solution.cu" in text
    assert "trapline reproduce" not in text  # its script would call NumPy


def test_cell_page_of_a_refused_answer_shows_what_the_compiler_said(site):
    text = page(site, "cells/", "refused")
    assert "What the compiler said" in text
    assert "identifier FLT_MAX is undefined" in text
    assert "Roofline" not in text


def test_cpu_cells_have_no_gpu_section(run):
    cell = run.cells[0].model_copy(update={"track": "cpu"})
    assert gpu.context(cell, None) == {}
    assert gpu.roofline([cell]) is None
    assert gpu.by_shape([cell]) == {}


@pytest.mark.parametrize("field", ["seconds", "light", "gold"])
@pytest.mark.parametrize("value", [0.0, float("nan"), "fast", None])
def test_rows_without_times_are_left_out(run, field, value):
    cell = run.cells[0]
    speed = json.loads(json.dumps(RECORDED["dimensions"]["speed"]))
    speed["evidence"]["shapes"][0][field] = value
    dimension = cell.dimensions["speed"].model_copy(update={"evidence": speed["evidence"]})
    bad = cell.model_copy(update={"dimensions": {**cell.dimensions, "speed": dimension}})
    assert len(gpu.shapes(bad)) == 2


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.234e-6, "1.23"), (29.16e-6, "29.2"), (0.0123456, "12,346")]
)
def test_microseconds_have_three_digits(seconds, shown):
    assert gpu.microseconds(seconds) == shown
