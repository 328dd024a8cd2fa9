"""Where attacks are tried, and the switches that both tracks have: by the names that attacks use in
their headers.

A switch replaces the one function (or line of a program inside) that is the defence; what it
replaces is ours, on our side of the wall, so the attack itself stays as it is. Nothing here is
reachable from the package, and nothing needs pytest: a GPU machine may lack it.
"""

import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import benches
import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.judge import checks, own_tests
from trapline.arena.process import proxy, session, wire
from trapline.arena.process.isolation import bubblewrap, landlock, limits, process
from trapline.arena.process.isolation.stage import SandboxStage
from trapline.arena.record import Level

ARENA = Path(checks.__file__).parents[1]


@dataclass
class Bench:
    """Where one attack is tried."""

    #: pytest's monkeypatch, or as much of it.
    patch: Any
    folder: Path
    challenge: Challenge
    level: Level
    seed: int = 20261115
    #: What the attack gained, by the judge that this one goes through.
    judge: Any = benches.graded
    #: The module whose IMPORT_SECONDS bound the import of a submission.
    importer: Any = session

    def edit(self, program: Path, *pairs: tuple[str, str]) -> None:
        """Gives the inside another text of one of its programs."""
        text = program.read_text()
        for old, new in pairs:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        edited = self.folder / "edited" / program.name
        edited.parent.mkdir(exist_ok=True)
        edited.write_text(text)
        add, chosen = SandboxStage._add, {program.name: edited}
        self.patch.setattr(
            SandboxStage, "_add", lambda stage, path: add(stage, chosen.get(path.name, path))
        )

    def leave_out(self, *names: str) -> None:
        """Starts sandboxes without these defences."""
        launch = session.launch
        self.patch.setattr(
            session, "launch", lambda spec: launch(replace(spec, without=spec.without | {*names}))
        )


class Switches(dict):
    """Name → what takes the defence of that name away."""

    def __call__(self, name):
        def register(function):
            self[name] = function
            return function

        return register

    def off(self, bench, cheat):
        for name in cheat.succeeds_without:
            self[name](bench)


COMMON = Switches()


@COMMON("a-pass-needs-answers")
def believe_the_dead(bench):
    run_check = checks.run_check

    def believing(check, submission, seed):
        deaths = submission.deaths
        result = run_check(check, submission, seed)
        died = submission.deaths > deaths
        return result.model_copy(update={"state": "pass"}) if died else result

    bench.patch.setattr(checks, "run_check", believing)


class Repeating:
    """The same values for the same shape, whoever asks."""

    def standard_normal(self, shape):
        return np.random.default_rng(zlib.crc32(repr(shape).encode())).standard_normal(shape)

    def __getattr__(self, name):
        return getattr(np.random.default_rng(5), name)


@COMMON("fresh-values")
def repeat_values(bench):
    bench.patch.setattr(checks, "generator", lambda seed, name: Repeating())


@COMMON("lengths-checked")
def believe_lengths(bench):
    for limit in ("MAX_HEADER", "MAX_BODY"):
        bench.patch.setattr(wire, limit, 1 << 64)


@COMMON("writable-text")
def keep_any_text(bench):
    bench.patch.setattr(wire, "_writable", lambda header: benches.as_json(header))
    for module in (session, proxy, own_tests):
        bench.patch.setattr(module, "printable", lambda text: text)


@COMMON("control-group")
def no_control_group(bench):
    bench.leave_out("cgroup")


@COMMON("system-call-filter")
def no_filter(bench):
    bench.leave_out("seccomp")


@COMMON("resource-limits")
def no_limits(bench):
    bench.leave_out("rlimits")


def add_to_environment(bench, **variables):
    for module in (bubblewrap, landlock, process):
        bench.patch.setattr(
            module, "environment", lambda *given: {**limits.environment(*given), **variables}
        )


@COMMON("fixed-environment")
def telling_environment(bench):
    add_to_environment(bench, CI="true")


@COMMON("hard-limits")
def soft_limits(bench):
    inside = ARENA / "process" / "isolation" / "inside.py"
    bench.edit(inside, ("(value, value + grace))", "(value, hard))"))
