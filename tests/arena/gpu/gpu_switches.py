"""Every defence of the GPU track that a test can switch off, by the name that attacks use.

As in `certify/switches.py`, a switch replaces the one function (or line of a program inside) that
is the defence; attacks stay as they are. Nothing here needs pytest: the whole set also runs on a
machine with a GPU that lacks it (`python tests/arena/gpu/campaign.py`).
"""

import contextlib
import sys
import time
from pathlib import Path

import benches
import numpy as np
from bench import ARENA, COMMON, Bench, Switches

from trapline.arena.certify import gpu_race, red_team
from trapline.arena.errors import Violation
from trapline.arena.gpu import fresh_inputs, judge, opening, rig, timing
from trapline.arena.process import session
from trapline.arena.process.isolation import stage
from trapline.arena.process.isolation.stage import SandboxStage

#: Long enough for what an attack leaves until after its call.
LATER = 0.5


class Patches:
    """As much of pytest's monkeypatch as the switches use."""

    def __init__(self):
        self._old = []

    def setattr(self, owner, name, value):
        self._old.append((owner, name, owner.__dict__[name]))
        setattr(owner, name, value)

    def undo(self):
        while self._old:
            owner, name, value = self._old.pop()
            setattr(owner, name, value)


SWITCHES = switch = Switches(COMMON)


# --- how an attack is judged ---------------------------------------------------------------------


#: Attacks that show in another way than by a grade.
SPECIAL = {
    "endless_call": benches.awaited,
    "endless_template": benches.awaited,
    "oversized_frame": benches.believed_length,
    "hostile_exception": benches.standing,
    "shrunk_buffer": benches.standing,
    "cache_between_cells": benches.graded_twice,
}


def prepare(bench, cheat):
    """Short deadlines for attacks that wait for one, and the judge that the attack needs."""
    bench.judge = SPECIAL.get(cheat.name, bench.judge)
    if cheat.slow:
        short = bench.challenge.plan.limits.model_copy(update={"call_seconds": 3.0})
        plan = bench.challenge.plan.model_copy(update={"limits": short})
        bench.patch.setattr(bench.challenge, "plan", plan)
        bench.patch.setattr(rig, "IMPORT_SECONDS", 20.0)


def switch_off(bench, cheat):
    SWITCHES.off(bench, cheat)
    if cheat.succeeds_at:
        bench.level = cheat.succeeds_at[0]


# --- where the verdict is reached, and on what ---------------------------------------------------

_CALL = 'returned = self.answer.call(header["entry"], self.values(header["values"]))'
_REPLY = 'return ({"op": "result", "returned": returned},)'
_JUDGED = """

    def judged(self, header):
        import torch

        x, by, y = self.last
        got = y if self.returned is None else self.returned
        return bool(torch.allclose(got, x * by[:, None], atol=1e-5))

    def do_burst("""
_CALLED = """self.last = self.values(header["values"])
        function = getattr(self.answer.module, header["entry"])
        self.returned, returned = function(*self.last), \"\""""


@switch("verdict-outside")
def verdict_inside(bench):
    """The runner compares, and the judge believes it."""
    told = _REPLY.replace("},)", ', "right": self.judged(header)},)')
    runner = ARENA / "gpu" / "runner.py"
    bench.edit(runner, (_CALL, _CALLED), (_REPLY, told), ("\n\n    def do_burst(", _JUDGED))

    def run(submission, entry, args, observe=False, late=False):
        call = rig.Call(submission.rig, submission.entries[entry], args)
        try:
            call.write_inputs()
            call.poison_outputs()
            order = {"op": "call", "entry": entry, "values": call.nodes}
            reply = submission.tell(order, call.placed)
        finally:
            call.release()
        if reply.get("right") is not True:
            raise Violation("the runner says that it is wrong")
        x, by = args
        return x * by[:, None], args

    bench.patch.setattr(rig.GpuSubmission, "_run", run)


@switch("nonce")
def believe_any_frame(bench):
    bench.patch.setattr(
        session.Session, "_hear", lambda self, deadline: self._channel.receive(deadline)
    )
    bench.patch.setattr(session.Session, "_refuse_unasked", lambda self: None)


def with_expected(bench, tell):
    """Has `tell(call, expected)` run before each call."""
    write = rig.Call.write_inputs

    def written(call):
        write(call)
        x, by = call.args
        tell(call, x * by[:, None])

    bench.patch.setattr(rig.Call, "write_inputs", written)


@switch("expected-outside")
def expected_in_the_question(bench):
    known = {}
    with_expected(bench, lambda call, expected: known.update(expected=expected.tolist()))
    tell = rig.GpuSubmission.tell
    bench.patch.setattr(
        rig.GpuSubmission,
        "tell",
        lambda self, header, placed: tell(self, {**header, **known}, placed),
    )


@switch("expected-not-in-buffers")
def expected_in_a_buffer(bench):
    def lay_out(call, expected):
        buffer = call.rig.take(expected.nbytes)
        place = rig.Placed(buffer, 0, expected.shape, rig.contiguous(expected.shape), "float32")
        call.rig.judge.write(buffer.number, 0, expected.tobytes())
        call.extra = place

    with_expected(bench, lay_out)
    placed = rig.Call.placed.fget
    bench.patch.setattr(rig.Call, "placed", property(lambda call: [*placed(call), call.extra]))


@switch("deadline")
def wait_for_ever(bench):
    bench.patch.setattr(rig, "IMPORT_SECONDS", 1e6)
    long = bench.challenge.plan.limits.model_copy(update={"call_seconds": 1e6})
    plan = bench.challenge.plan.model_copy(update={"limits": long})
    bench.patch.setattr(bench.challenge, "plan", plan)


# --- how answers are compared --------------------------------------------------------------------


def compare(bench, agree):
    cases = bench.challenge.module("cases")

    def near(got, want, *, dtype, slack=0.0, what):
        if not agree(np.asarray(got, np.float64), want):
            raise Violation(what)

    bench.patch.setattr(cases, "near", near)


@switch("values-compared")
def compare_shapes(bench):
    compare(bench, lambda got, want: got.shape == want.shape)


@switch("every-element-compared")
def compare_the_first_row(bench):
    compare(bench, lambda got, want: np.allclose(got[0], want[0]))


@switch("nan-is-no-number")
def compare_differences(bench):
    compare(bench, lambda got, want: not np.any(np.abs(got - want) > 1e-5))


@switch("bound-of-the-dtype")
def compare_loosely(bench):
    compare(bench, lambda got, want: np.allclose(got, want, rtol=2e-2, atol=2e-2))


@switch("own-copy-of-inputs")
def share_inputs(bench):
    run = rig.GpuSubmission._run

    def shared(submission, entry, args, observe=False, late=False):
        answer, left = run(submission, entry, args, observe=True)
        for mine, theirs in zip(args, left, strict=True):
            mine[...] = theirs
        return answer, left

    bench.patch.setattr(rig.GpuSubmission, "_run", shared)


# --- buffers -------------------------------------------------------------------------------------


@switch("poison")
def leave_outputs(bench):
    """Outputs hold what they held, and the same question gets the same buffers."""
    bench.patch.setattr(rig.Call, "poison_outputs", lambda call: None)
    bench.patch.setattr(rig.random, "random", lambda: 0.0)


@switch("borders")
def unchecked_borders(bench):
    bench.patch.setattr(rig.Call, "check_borders", lambda call: None)


@switch("unmapped-behind")
def room_behind(bench):
    """Tensors begin where their buffers begin: behind them the mapping goes on."""

    def place(call, shape, strides, dtype):
        size = rig.span(shape, strides) * rig.STORED[dtype].itemsize
        return rig.Placed(call.rig.take(size + 4096), 0, shape, strides, dtype)

    bench.patch.setattr(rig.Call, "_place", place)


@switch("freezing")
def slow_judge(bench):
    """Nothing is frozen, and the judge takes its time before it reads."""

    @contextlib.contextmanager
    def unfrozen(submission):
        time.sleep(LATER)
        yield

    bench.patch.setattr(rig.GpuSubmission, "frozen", unfrozen)


@switch("sealed-buffers")
def unsealed(bench):
    """A judge of its own, which may end, makes buffers without seals."""
    module = "trapline.arena.gpu.memory"
    text = f"import {module} as memory\n\nmemory._SIZE_SEALS = 0\n"
    (bench.folder / "sitecustomize.py").write_text(text)
    environment = judge._environment()
    environment["PYTHONPATH"] = f"{bench.folder}:{environment['PYTHONPATH']}"
    bench.patch.setattr(judge, "_environment", lambda: environment)
    own = rig.Rig("cpu")
    bench.patch.setattr(opening, "shared_rig", lambda device: own)


# --- what is asked -------------------------------------------------------------------------------


def without_case(bench, *names):
    kept = [case for case in bench.challenge.cases if case.id not in names]
    bench.challenge.__dict__["cases"] = kept


@switch("one-value-changes")
def values_change_together(bench):
    without_case(bench, "one-value-changes")


@switch("shapes-of-every-kind")
def round_shapes(bench):
    cases = bench.challenge.module("cases")
    bench.patch.setattr(cases, "SHAPES", ((8, 8), (64, 32), (7, 256)))
    draw = cases.drawn
    bench.patch.setattr(cases, "drawn", lambda rng, shape: draw(rng, (shape[0], 8 * shape[1])))


# --- time ----------------------------------------------------------------------------------------


@switch("timed-outputs-checked")
def time_only(bench):
    """A burst counts, whatever it wrote and whichever path it took."""

    def burst(clock, groups, patience=timing.LAG, *, whole=False):
        table = [[0, 0] for _ in clock.ring.slots]
        clock.ring.poison()
        begun = time.perf_counter()
        clock.tell(start=0, table=table, groups=groups, patience=patience)
        return time.perf_counter() - begun

    bench.patch.setattr(timing.Clock, "burst", burst)


@switch("fresh-inputs")
def seen_inputs_only(bench):
    bench.patch.setattr(gpu_race, "refuse_remembered", lambda *_: None)


@switch("judge-looks-first")
def believe_the_reply(bench):
    """The clock stops at the reply, and the judge takes its time before it reads."""
    bench.patch.setattr(fresh_inputs, "_is_written", lambda slot: True)
    check = fresh_inputs._check
    bench.patch.setattr(fresh_inputs, "_check", lambda *args: time.sleep(LATER) or check(*args))


@switch("least-share")
def believe_slopes(bench):
    bench.patch.setattr(timing, "LEAST_SHARE", 0.0)


@switch("clock-outside")
def clock_inside(bench):
    """The runner says how long a burst took."""
    path = 'path = made.run(header["start"], header["table"], header["groups"], header["patience"])'
    bench.edit(
        ARENA / "gpu" / "burst.py",
        (path, f"import time\n\n    begun = time.perf_counter()\n    {path}"),
        ('return {"path": path}', 'return {"path": path, "seconds": time.perf_counter() - begun}'),
    )
    tell, said = timing.Clock.tell, {}

    def told(clock, **order):
        reply = tell(clock, **order)
        said["seconds"] = reply.get("seconds")
        return reply

    burst = timing.Clock.burst

    def inside(clock, *args, **kwargs):
        burst(clock, *args, **kwargs)
        return said["seconds"]

    bench.patch.setattr(timing.Clock, "tell", told)
    bench.patch.setattr(timing.Clock, "burst", inside)


# --- the sandbox ---------------------------------------------------------------------------------


@switch("file-rules")
def no_file_rules(bench):
    bench.leave_out("landlock")


@switch("folders-of-another-user")
def folders_of_everybody(bench):
    """What a runner is served from can be written by any user."""
    make = stage._make_readable_folder

    def shared(path):
        make(path)
        path.chmod(0o777)

    bench.patch.setattr(stage, "_make_readable_folder", shared)


@switch("private-scratch")
def shared_scratch(bench):
    """One folder for every runner, without the file system that hides it."""
    shared = bench.folder / "shared"
    shared.mkdir(exist_ok=True)
    made = SandboxStage.__init__

    def init(made_stage, program, submission):
        made(made_stage, program, submission)
        made_stage.scratch = shared

    bench.patch.setattr(SandboxStage, "__init__", init)
    bench.leave_out("namespaces")


def new_bench(patch, folder, level):
    corpus = red_team.find_corpus("gpu")
    if str(corpus.parent) not in sys.path:
        sys.path.append(str(corpus.parent))
    return Bench(patch, Path(folder), red_team.load_challenge(corpus, "gpu"), level, importer=rig)
