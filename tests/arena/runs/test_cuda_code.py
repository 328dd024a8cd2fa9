"""CUDA answers to other prompts: read, called through an adapter, repaired where that is asked."""

import shutil
import subprocess

import pytest

from trapline.arena.challenge import load
from trapline.arena.errors import UsageError
from trapline.arena.runs import cuda_code
from trapline.arena.runs.adopt import AdoptOptions, adopt
from trapline.arena.runs.field import find_entries, read_settings

NAME = "launch_fused_softmax_topk"
#: One thread a row, the largest that is left in each of k turns.
ANSWER = """
#include <cfloat>
template <int K>
__global__ void pick(const float* x, int* i, float* p, int V) {
    const float* row = x + (size_t)blockIdx.x * V;
    float most = -FLT_MAX, total = 0.f;
    for (int v = 0; v < V; ++v) most = fmaxf(most, row[v]);
    for (int v = 0; v < V; ++v) total += expf(row[v] - most);
    for (int n = 0; n < K; ++n) {
        int best = -1;
        for (int v = 0; v < V; ++v) {
            bool taken = false;
            for (int m = 0; m < n; ++m) taken |= i[blockIdx.x * K + m] == v;
            if (!taken && (best < 0 || row[v] > row[best])) best = v;
        }
        i[blockIdx.x * K + n] = best;
        p[blockIdx.x * K + n] = expf(row[best] - most) / total;
    }
}
// launch_fused_softmax_topk(x) { is not the launcher
template <int K>
void launch_fused_softmax_topk(const float* x, int* i, float* p, int B, int T, int V,
                               cudaStream_t stream = 0) {
    pick<K><<<B * T, 1, 0, stream>>>(x, i, p, V);
}
"""
MARKDOWN = f"# A kernel\n\nIt is *fast*.\n\n```cuda\n{ANSWER}```\n\n## Notes\n\n│ box │\n"


def launcher(tmp_path, text, name="answer.cu"):
    (tmp_path / name).write_text(text)
    (found,) = cuda_code.find_launchers(tmp_path, NAME)
    return found


def test_template_is_called_with_its_k(tmp_path):
    found = launcher(tmp_path, ANSWER)
    assert (found.file, found.is_template) == ("answer.cu", True)
    text = cuda_code.adapter("@FILE@ @INDEX@ @CALL@", found)
    assert text == f"answer.cu int {NAME}<32>(x, i, p, B, T, V, stream)"


def test_launcher_without_template_gets_k_by_name(tmp_path):
    text = (
        f"cudaError_t {NAME}(const float* __restrict__ logits, float* prob, int64_t* idx,\n"
        "    int V, int batch, int T, int top_k) {"
    )
    given = cuda_code.arguments(launcher(tmp_path, text))
    assert given == (["x", "p", "i", "V", "B", "T", "k"], "int64_t")


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("const float* x, int* i, float* p, int B, int T, int stride", "takes int stride"),
        ("const half* x, int* i, float* p, int B", "takes const half\\* x"),
        ("const float* x, float* p, int B, int T, int V", "other pointers"),
    ],
)
def test_what_is_unclear_is_said(tmp_path, parameters, told):
    found = launcher(tmp_path, f"void {NAME}({parameters}) {{")
    with pytest.raises(ValueError, match=told):
        cuda_code.arguments(found)


def test_calls_and_declarations_are_no_launchers(tmp_path):
    (tmp_path / "test.cu").write_text(f"int main() {{ {NAME}<8>(x, i, p, 1, 1, 9); }}")
    (tmp_path / "kernel.cuh").write_text(f"void {NAME}(const float* x);")
    assert cuda_code.find_launchers(tmp_path, NAME) == []


def test_code_that_needs_no_repair_stays_as_it_is():
    assert cuda_code.repaired(ANSWER) == (ANSWER, [])


def test_markdown_prose_and_headers_are_repaired():
    text, notes = cuda_code.repaired(MARKDOWN)
    assert text == ANSWER
    assert notes == ["took 1 fenced blocks of CUDA out of Markdown"]
    broken = '/* a — b\n */\n//\n * list\nint x = FLT_MAX; // ↔\nputs("→");\n§\n'
    text, notes = cuda_code.repaired(broken)
    assert notes == ["made comments of 2 lines of prose", "included cfloat"]
    assert text.splitlines()[4] == "//  * list"
    assert text.splitlines()[-1] == "// §"
    assert 'puts("→");' in text


@pytest.fixture
def tree(tmp_path):
    for entrant, text in (("right", ANSWER), ("prose", MARKDOWN), ("none", "int x;")):
        folder = tmp_path / "tree" / entrant / "fuse"
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_text(text)
    return tmp_path / "tree"


def test_answers_are_adopted_as_they_were_written(tree, tmp_path):
    found = {one.entrant: one for one in adopt(tree, tmp_path / "f", options())}
    assert found["right"].sentence == f"by kernel.cu: {NAME}<k>"
    assert "no CUDA file defines" in found["none"].sentence
    folder = tmp_path / "f" / "prose" / "fused_softmax_topk"
    assert (folder / "kernel.cu").read_text() == MARKDOWN
    assert '#include "kernel.cu"' in (folder / "adapter.cu").read_text()
    assert read_settings(tmp_path / "f").track == "gpu"
    entries = {entry.entrant: entry for entry in find_entries(tmp_path / "f", [], track="gpu")}
    assert sorted(entries) == ["gold", "prose", "right"]
    assert {entry.profile for entry in entries.values()} == {"published"}


def test_repair_is_named_and_changes_the_entrant(tree, tmp_path):
    found = {one.entrant: one for one in adopt(tree, tmp_path / "f", options(repair=True))}
    assert (tmp_path / "f" / "right").is_dir()
    assert not (tmp_path / "f" / "prose").exists()
    folder = tmp_path / "f" / "prose-repaired" / "fused_softmax_topk"
    assert (folder / "kernel.cu").read_text() == ANSWER
    assert found["prose"].notes[-1].startswith("repaired kernel.cu: took 1 fenced blocks")


def test_a_field_of_the_gpu_track_is_graded_there(tree, tmp_path):
    adopt(tree, tmp_path / "f", options())
    with pytest.raises(UsageError, match="add --track gpu"):
        find_entries(tmp_path / "f", [])


def options(**more):
    return AdoptOptions("published", track="gpu", **more)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("entrant", "error"), [("right", ""), ("prose", "kernel.cu:")])
def test_adapter_compiles_where_the_answer_does(tree, tmp_path, entrant, error):
    adopt(tree, tmp_path / "f", options())
    folder = tmp_path / "f" / entrant / "fused_softmax_topk"
    header = load("fused_softmax_topk", "gpu").folder.parents[2] / "arena" / "gpu"
    command = ["nvcc", "-arch=sm_90", "-std=c++17", "-c", "-I", str(header), "-I", str(folder)]
    command += ["-o", str(tmp_path / "x.o"), str(folder / "adapter.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not error), done.stderr
    assert error in done.stderr
