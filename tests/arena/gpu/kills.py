"""Answers that end, hang or fill the GPU, and graders that are killed: what comes next is right.

`python tests/arena/gpu/kills.py` prints one line a test and exits with 4 if one fails. It grades
the scaling challenge, on a GPU or, with TRAPLINE_GPU_STAND_IN=1, on what stands in for one.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from trapline.arena import challenge
from trapline.arena.certify import red_team
from trapline.arena.gpu.memory import device_here
from trapline.arena.gpu.opening import shared_rig
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.sandbox import bounds_processes
from trapline.arena.runs import run
from trapline.arena.runs.store import Store

HEAD = '#include "trapline.h"\n'
ENTRY = """
extern "C" void scaled(const trapline_tensor* x, const trapline_tensor* by,
                       const trapline_tensor* y, cudaStream_t stream) {
    bad<<<1, 32, 0, stream>>>((float*)y->data);
}
"""
#: Answers, and a word of the reason with which they fail.
BAD = {
    "endless kernel": (
        "solution.cu",
        HEAD
        + "__global__ void bad(volatile float* y) { while (y[0] != 1.5f) y[1] = 2.0f; }"
        + ENTRY,
        "no answer within",
    ),
    "illegal access": (
        "solution.cu",
        HEAD + "__global__ void bad(float* y) { *(volatile float*)64 = y[0]; }" + ENTRY,
        "illegal",
    ),
    "200 GB asked for": (
        "solution.py",
        "import torch\n\n\ndef scaled(x, by, y):\n"
        "    torch.empty(200 * 10**9, dtype=torch.uint8, device=y.device).fill_(1)\n",
        "memory",
    ),
    "all of the GPU's memory": (
        "solution.py",
        "import torch\n\nHELD = []\n\n\ndef scaled(x, by, y):\n    while True:\n"
        "        HELD.append(torch.empty(1 << 30, dtype=torch.uint8, device=y.device))\n",
        "memory",
    ),
    "fork bomb": (
        "solution.py",
        "import os\n\n\ndef scaled(x, by, y):\n    while True:\n        try:\n"
        "            os.fork()\n        except OSError:\n            pass\n",
        "",
    ),
}
#: They need a real GPU: host memory has no kernels, and this machine's memory is not to be filled.
ON_A_GPU = ("endless kernel", "illegal access", "200 GB asked for", "all of the GPU's memory")
RIGHT = "def scaled(x, by, y):\n    y.copy_(x * by[:, None])\n"
WRONG = "def scaled(x, by, y):\n    y.copy_(x * by.abs()[:, None])\n"
FIELD = {"right": RIGHT, "wrong": WRONG, "again": RIGHT}
LEVEL = "landlock"


def scaling(call_seconds):
    found = red_team.load_challenge(red_team.find_corpus("gpu"), "gpu")
    limits = found.plan.limits.model_copy(update={"call_seconds": call_seconds})
    found.plan = found.plan.model_copy(update={"limits": limits})
    return found


def lay_out(folder, name, text):
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, name).write_text(text)
    return Path(folder)


def cell(judged, name, text, seed=5):
    with tempfile.TemporaryDirectory(prefix="trapline-") as folder:
        asked = GradeRequest(
            "one", judged.id, 1, lay_out(folder, name, text), level=LEVEL, seed=seed, track="gpu"
        )
        return grade(asked, judged).cell


def bad_answers():
    """Each fails with its reason, and after each the next cell is right."""
    judged, device = scaling(4.0), device_here()
    cell(judged, "solution.py", RIGHT)  # the judge's context is there from now on
    free = shared_rig(device).judge.ask("free_bytes")
    for name, (file, text, reason) in BAD.items():
        if name in ON_A_GPU and device == "cpu":
            continue
        if name == "fork bomb" and not bounds_processes(LEVEL, gpu=device == "cuda"):
            yield False, name, "not let off: this machine does not limit root's processes"
            continue
        begun = time.monotonic()
        found, seconds = cell(judged, file, text), time.monotonic() - begun
        after = cell(judged, "solution.py", RIGHT)
        lost = (free - shared_rig(device).judge.ask("free_bytes")) >> 20
        good = found.state == "fail" and reason in found.reason and after.state == "pass"
        good = good and (device == "cpu" or lost < 256)
        yield (
            good,
            name,
            (
                f"{found.state} in {seconds:.0f} s ({found.reason[:90]!r}), next {after.state} "
                f"{after.score}, {lost} MiB of GPU memory not given back"
            ),
        )


def grade_all(folder, place):
    """As `trapline grade`: every entrant of a field, into a run."""
    judged = scaling(20.0)
    challenge.load_all.cache_clear()
    challenge.load_all = lambda *_: {"scaling": judged}
    run._check_once = lambda *_: None  # which would take the time in which graders are killed
    asked = [
        GradeRequest(name, "scaling", 1, Path(folder, name), track="gpu") for name in sorted(FIELD)
    ]
    with run.open_run(place) as store:
        store.set_meta(seed=11)
        for graded in run.grade_field(asked, store, run.Options(LEVEL, workers=1)):
            print(graded.entrant, flush=True)


def table(place):
    if not Path(place).exists():
        return {}
    store = Store(place, create=False)
    try:
        assert all(store.has_bundle(one.bundle) for one in store.cells())
        return {one.entrant: (one.state, one.score) for one in store.cells()}
    finally:
        store.close()


def kept(place):
    try:
        return table(place)
    except Exception:  # killed before it had made a run
        return {}


def killed_graders(folder, place, kills, chance):
    """Kills a grader so many times; says how often, what was lost, and what the run holds."""
    command = [sys.executable, __file__, "--grade", str(folder), str(place)]
    before, lost, done = {}, 0, 0
    while done < kills:
        grader = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            grader.wait(chance.uniform(2.0, 14.0))
        except subprocess.TimeoutExpired:
            grader.kill()
            grader.wait()
            done += 1
        after = kept(place)
        lost += sum(after.get(name) != value for name, value in before.items())
        before = after
        if len(after) == len(FIELD):
            place, before = place.with_name(place.name + "+"), {}
            command[-1] = str(place)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return done, lost, table(place)


def all_killed_graders(kills, side_by_side):
    with tempfile.TemporaryDirectory(prefix="trapline-") as name:
        for entrant, text in FIELD.items():
            lay_out(Path(name, "field", entrant), "solution.py", text)
        with ThreadPoolExecutor(side_by_side) as pool:
            share = -(-kills // side_by_side)
            chains = [
                pool.submit(
                    killed_graders,
                    Path(name, "field"),
                    Path(name, f"run{number}"),
                    share,
                    random.Random(number),
                )
                for number in range(side_by_side)
            ]
            results = [chain.result() for chain in chains]
    want = {"right": ("pass", 100.0), "again": ("pass", 100.0)}
    for done, lost, found in results:
        wrong = found.get("wrong", ("", 0))[0] == "fail"
        good = lost == 0 and wrong and {k: v for k, v in found.items() if k in want} == want
        yield good, f"{done} × kill -9", f"{lost} cells lost; afterwards {found}"
    judged = scaling(20.0)
    after = cell(judged, "solution.py", RIGHT, seed=random.getrandbits(30))
    yield after.state == "pass", "a cell after all that", f"{after.state} {after.score}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grade", nargs=2, metavar=("FIELD", "RUN"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--side-by-side", type=int, default=4)
    given = parser.parse_args()
    if given.grade:
        grade_all(*given.grade)
        return
    bad = 0
    for results in (bad_answers(), all_killed_graders(given.kills, given.side_by_side)):
        for good, name, told in results:
            bad += not good
            print(f"{'ok ' if good else 'BAD'} {name:24} {told}", flush=True)
    raise SystemExit(4 if bad else 0)


if __name__ == "__main__":
    main()
