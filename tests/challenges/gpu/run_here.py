"""Runs GPU solutions, mutants and controls on CPU tensors; test_gpu_challenges.py reads the result.

A process of its own: whether Triton interprets is decided when it is imported.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trapline.arena import challenge as challenges
from trapline.arena.gpu.local import LocalGpuSubmission
from trapline.arena.gpu.rig import Rig
from trapline.arena.judge.checks import first_failure, generator, run_check

SEED = 7
#: The interpreter is wrong for bfloat16, too slow or too small for the next, and has no streams.
LEFT_OUT = ("bfloat16", "two-billion", "65535", "wrong-stream")
QUICK_CASES, QUICK_TRAPS = 1, 2


def main(folder: Path) -> None:
    wanted = json.loads((folder / "wanted.json").read_text())
    if "field" in wanted:
        here = Here(challenges.load(wanted["challenge"], "gpu"))
        found = here.failed(Path(wanted["field"]), [*here.cases, *here.traps])
        (folder / "found.json").write_text(json.dumps([result.id for result in found]))
        return
    found = []
    for name in wanted["challenges"]:
        here = Here(challenges.load(name, "gpu"))
        found += here.quick() if wanted["quick"] else here.everything()
    (folder / "found.json").write_text(json.dumps(found))


def apart(work: Callable[[], str]) -> str:
    """What the work returns, done in a child: a bug that reads outside its memory may end it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, work().encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return answer if status == 0 else "died"


class Here:
    def __init__(self, challenge):
        self.challenge = challenge
        self.rig = Rig("cpu", local=True)
        self.cases = [case for case in challenge.cases if runs_here(case)]
        self.traps = [trap for trap in challenge.traps if runs_here(trap)]

    def quick(self):
        yield self.right(self.challenge.solution, self.cases[:QUICK_CASES])
        for trap in self.traps[:QUICK_TRAPS]:
            yield self.mutant(trap, trap.id, with_control=False)

    def everything(self):
        checks = [*self.cases, *self.traps]
        alternates = self.challenge.folder / "alternates"
        for folder in (self.challenge.solution, alternates / "triton", alternates / "torch"):
            yield self.right(folder, checks)
        for trap in self.traps:
            yield from (self.mutant(trap, form) for form in trap.forms)
        yield from map(self.control, WORTHLESS)

    def open(self, folder, kind=LocalGpuSubmission):
        entries = self.challenge.module("cases").ENTRIES
        return kind(folder, self.challenge.sandbox_config("process"), entries, self.rig)

    def found(self, subject, problem):
        return {"challenge": self.challenge.id, "subject": subject, "problem": problem}

    def failed(self, folder, checks):
        submission = self.open(folder)
        results = [run_check(check, submission, SEED) for check in checks]
        return [result for result in results if result.state == "fail"]

    def right(self, folder, checks):
        bad = [f"{result.id}: {result.message}" for result in self.failed(folder, checks)]
        return self.found(folder.name, "; ".join(bad))

    def mutant(self, trap, form, with_control=True):
        files = trap.plant(self.challenge.solution_files(), form)
        with tempfile.TemporaryDirectory() as folder:
            for name, source in files.items():
                Path(folder, name).write_text(source)
            problem = ""
            if with_control:
                problem = apart(lambda: self.on_its_control(trap, Path(folder)))
            if not problem and not apart(lambda: self.on_its_trap(trap, Path(folder))):
                problem = "survives its own trap"
        return self.found(form, problem)

    def on_its_control(self, trap, folder):
        """Why the mutant fails the situation without the bug's trigger."""
        try:
            if trap.control is not None:
                trap.control(self.open(folder), generator(SEED, trap.id))
        except Exception as error:
            return f"fails the trap's control, too: {error}"
        return ""

    def on_its_trap(self, trap, folder):
        return run_check(trap, self.open(folder), SEED).message

    def control(self, name):
        submission = self.open(self.challenge.solution, Worthless)
        submission.replace = WORTHLESS[name]
        failed = first_failure(self.cases, submission, SEED)
        return self.found(name, "" if failed else "passes every case")


class Worthless(LocalGpuSubmission):
    """The gold solution, whose answers are replaced by others of the same form."""

    def _ask(self, entry, args, kwargs, on):
        answer = super()._ask(entry, args, kwargs, on)
        parts = answer if isinstance(answer, tuple) else (answer,)
        parts = tuple(self.replace(part, args) for part in parts)
        return parts if isinstance(answer, tuple) else parts[0]


def copied(value, args):
    arrays = [a for a in args if isinstance(a, np.ndarray) and a.size]
    return np.resize(arrays[0], value.shape).astype(value.dtype) if arrays else value * 0


def noise(value, args):
    values = np.random.default_rng().standard_normal(value.shape)
    return values.astype(value.dtype)


def remembering():
    seen = {}
    return lambda value, args: seen.setdefault((value.shape, value.dtype.str), value)


WORTHLESS = {
    "zeros": lambda value, args: np.zeros_like(value),
    "copy": copied,
    "noise": noise,
    "last answer": remembering(),
}


def runs_here(check):
    return not any(word in check.id for word in LEFT_OUT)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
