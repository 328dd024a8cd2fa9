"""Exported kernel repositories: complete, alone, and right when `kernels` loads them."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trapline.arena.errors import UsageError
from trapline.arena.export.hf_kernels import FAMILIES, VARIANTS, repository_name, write_kernels

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
#: What the sources may import beside each other and the standard library.
ALLOWED = {"torch", "triton", "numpy"}
#: For results of about 1 in float32.
LARGEST = 2e-6


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    out = tmp_path_factory.mktemp("kernels")
    write_kernels(out)
    return out


def run(script, folder, **environment):
    """Runs a script of this folder in a process of its own; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"HF_HUB_OFFLINE": "1", "TRITON_CACHE_DIR": str(folder / "cache"), **environment}
    command = [sys.executable, str(HERE / script), str(folder)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def sources(repository):
    return sorted((repository / "torch-ext").rglob("*.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_repository_imports_only_torch_triton_and_itself(repositories, family):
    for path in sources(repositories / repository_name(family)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            roots = {name.split(".")[0] for name in names}
            assert roots <= ALLOWED | sys.stdlib_module_names, path


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_accepts_the_layout(repositories, family):
    rust = pytest.importorskip("kernels._rust")
    repository = repositories / repository_name(family)
    assert {str(one) for one in rust.Build.open(repository).general.backends} == {"cpu", "cuda"}
    for variant in VARIANTS:
        metadata = rust.Metadata.read_from_file(repository / "build" / variant / "metadata.json")
        assert str(metadata.name) == repository.name


def measured(file, case):
    """Contestant → its record in the committed results."""
    results = json.loads((ROOT / "benchmarks/results/nvidia-h200" / file).read_text())["results"]
    return {one["name"]: one for one in results[case]["times"]}


def times(ours, peer):
    return peer["seconds"] / ours["seconds"]


def norm_rows():
    found = measured("norms.json", "layer norm backward 8192×8192 bfloat16")
    ours = found["trapline"]
    yield (
        f"{ours['gb_per_s'] / 1000:.1f} TB/s, {100 * times(ours, found['copy']):.0f} % of a copy",
        f"{times(ours, found['torch']):.1f}× torch",
    )


def topk_rows():
    found = measured("softmax_topk.json", "512×128256 k64 float32")
    ours = found["trapline"]
    yield (
        f"{1e6 * ours['seconds']:.0f} µs, {100 * times(ours, found['read']):.0f} % of reading them",
        f"{times(ours, found['torch softmax, topk']):.0f}× torch",
    )


def attention_rows():
    found = measured("attention.json", "forward D128 N16384 causal")
    ours = found["ours hopper"]
    yield f"{ours['tflop_per_s']:.0f} TFLOP/s", f"{times(ours, found['cuDNN']):.2f}× cuDNN"
    found = measured("attention.json", "backward D128 N16384 causal")
    ours, fixed = found["ours hopper, not deterministic"], found["ours hopper, deterministic"]
    yield (
        f"{ours['tflop_per_s']:.0f} TFLOP/s (deterministic: {fixed['tflop_per_s']:.0f})",
        f"{times(ours, found['cuDNN']):.2f}× cuDNN "
        f"(deterministic: {times(fixed, found['cuDNN']):.2f}×)",
    )


def paged_rows():
    found = measured("paged_attention.json", "anchor B8 H32 G8 D128 L1024 page 16 bf16")
    gain = times(found["ours"], found["FlashAttention-2, contiguous"])
    yield (
        f"{1e6 * found['ours']['seconds']:.2f} µs",
        f"{gain:.2f}× FlashAttention-2 on a contiguous cache",
    )


ROWS = {
    "norms": norm_rows,
    "softmax_topk": topk_rows,
    "attention": attention_rows,
    "paged": paged_rows,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_of_the_card_are_those_of_the_committed_results(repositories, family):
    card = (repositories / repository_name(family) / "CARD.md").read_text()
    assert [row[1:] for row in FAMILIES[family].figures] == [*ROWS[family]()]
    for row in FAMILIES[family].figures:
        assert f"| {' | '.join(row)} |" in card


def test_results_of_loaded_kernels_equal_the_oracles(repositories):
    pytest.importorskip("kernels")
    run("load_kernels.py", repositories, TRITON_INTERPRET="1")
    found = json.loads((repositories / "differences.json").read_text())
    assert {family for family, each in found.items() if any("kernel" in name for name in each)} == {
        family.replace("_", "-") for family in FAMILIES
    }
    assert max(value for each in found.values() for value in each.values()) < LARGEST, found


@pytest.mark.needs_gpu
def test_results_on_a_gpu_equal_the_oracles(repositories):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    run("load_kernels.py", repositories)
    found = json.loads((repositories / "differences.json").read_text())
    assert max(value for each in found.values() for value in each.values()) < 10 * LARGEST, found


def test_sources_work_without_numpy_and_trapline(repositories):
    pytest.importorskip("torch")
    run("without_numpy.py", repositories, PYTHONPATH="")


def test_existing_repository_is_left_alone(repositories):
    with pytest.raises(UsageError, match="left alone"):
        write_kernels(repositories)
