"""Cost of the arena and accuracy of its timing, beside a checker with one process per test.

    python benchmarks/bench_arena.py [--evalplus FOLDER] [--rounds 40] [--out benchmarks/results]

Prints sandboxed calls a second, round-trip time, bytes a second, cells a minute, and two timing
campaigns: the gold solution against itself, and against a copy that takes 1.3 times as long.
`--evalplus` names a folder that holds the evalplus package and psutil (`pip download --no-deps`).
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from trapline.arena.challenge import load
from trapline.arena.judge import measure
from trapline.arena.judge.grade import grade, versions
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.proxy import Submission
from trapline.arena.runs.run import choose_level

CHALLENGE = "flash_attention_forward"
TRIVIAL = (
    "import numpy as np\n\n\ndef add(a, b):\n    return a + b\n\n\ndef echo(x):\n    return x\n"
)
SLOWER = """

def _slower(function):
    import functools
    import time

    @functools.wraps(function)
    def call(*args, **kwargs):
        started = time.perf_counter()
        answer = function(*args, **kwargs)
        now = time.perf_counter()
        while time.perf_counter() < now + 0.3 * (now - started):
            pass
        return answer

    return call


flash_attention = _slower(flash_attention)
"""
WITHIN = (0.93, 1.07)


def trivial(folder: Path, level: str) -> dict[str, float]:
    """Calls a second, median round trip, and bytes a second both ways."""
    (folder / "solution.py").write_text(TRIVIAL)
    big = np.ones(48 << 17)
    with Submission(folder, load(CHALLENGE).sandbox_config(level)) as submission:
        submission.add(1, 2)
        times = [_timed(lambda: submission.add(1, 2)) for _ in range(3000)]
        submission.echo(big)
        moved = min(_timed(lambda: submission.echo(big)) for _ in range(7))
    return {
        "calls_per_second": len(times) / sum(times),
        "round_trip_ms": 1e3 * median(times),
        "gigabytes_per_second": 2 * big.nbytes / moved / 1e9,
    }


def _timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def evalplus(folder: Path) -> dict[str, float]:
    """The same trivial function through EvalPlus's checker: a process for each test."""
    sys.path.insert(0, str(folder))
    from evalplus.eval import untrusted_check

    code = "def add(a, b):\n    return a + b\n"
    count = 40

    def check() -> None:
        status, _ = untrusted_check("humaneval", code, [[1, 2]], "add", [3], 0, [0.1], True)
        assert status == "pass", status

    check()
    seconds = _timed(lambda: [check() for _ in range(count)])
    return {"checks_per_second": count / seconds}


def cells_per_minute(level: str) -> float:
    """Whole grades of the gold solution, one after another."""
    challenge = load(CHALLENGE)
    entry = GradeRequest("gold", CHALLENGE, 1, challenge.solution)
    seconds = [
        _timed(lambda: grade(replace(entry, level=level, seed=1), challenge)) for _ in range(3)
    ]
    return 60 / median(seconds)


def campaign(folder: Path, level: str, rounds: int) -> list[float]:
    """The measured ratio, reference time over submission time, again and again."""
    challenge = load(CHALLENGE)
    config = challenge.sandbox_config(level)
    ratios = []
    for _ in range(rounds):
        with Submission(folder, config) as one, Submission(challenge.solution, config) as reference:
            dimension, _ = measure.speed(
                challenge, one, reference, np.random.default_rng(), measure.FULL_ROUNDS
            )
        ratios.append(dimension.evidence["ratio"])
    return ratios


def slower_copy(folder: Path) -> Path:
    """The gold solution, 1.3 times slower."""
    gold = (load(CHALLENGE).solution / "solution.py").read_text()
    (folder / "solution.py").write_text(gold + SLOWER)
    return folder


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Everything, in one run."""
    level = choose_level()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        result: dict[str, object] = {"level": level, "arena": trivial(Path(one), level)}
        if arguments.evalplus:
            result["evalplus"] = evalplus(arguments.evalplus)
        result["cells_per_minute"] = cells_per_minute(level)
        same = campaign(load(CHALLENGE).solution, level, arguments.rounds)
        slower = campaign(slower_copy(Path(two)), level, arguments.rounds)
    within = sum(WITHIN[0] <= ratio <= WITHIN[1] for ratio in same)
    result["same"] = {"ratios": same, "share_within_7_percent": within / len(same)}
    result["slower"] = {"ratios": slower, "largest": max(slower)}
    return result


def main() -> None:
    """Prints a table and writes the JSON beside the other results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evalplus", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    result = run(parser.parse_args())
    device = f"cpu-{platform.machine()}"
    arena = result["arena"]
    print(f"{'sandboxed calls a second':42} {arena['calls_per_second']:10.0f}")
    print(f"{'round trip of a small call, ms':42} {arena['round_trip_ms']:10.3f}")
    print(f"{'large arrays, both ways, GB/s':42} {arena['gigabytes_per_second']:10.2f}")
    if "evalplus" in result:
        theirs = result["evalplus"]["checks_per_second"]
        print(f"{'EvalPlus checks a second':42} {theirs:10.0f}")
        print(f"{'ratio (goal: 20)':42} {arena['calls_per_second'] / theirs:10.1f}")
    print(f"{'cells a minute, one at a time':42} {result['cells_per_minute']:10.1f}")
    share = result["same"]["share_within_7_percent"]
    print(f"{'same against itself, within 0.93–1.07':42} {share:10.1%}")
    print(f"{'1.3 times slower copy, largest ratio':42} {result['slower']['largest']:10.3f}")
    folder = parser.parse_args().out / device
    folder.mkdir(parents=True, exist_ok=True)
    document = {"device": device, "versions": versions(), **result}
    (folder / "arena.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
