"""Ways to put an attack to the test: each takes a bench and an attack and says what it gained.

Most attacks are graded like any submission. What depends on time is driven by a clock of our own,
so that no other process on the machine can change the outcome.
"""

import contextlib
import json
import socket
import tempfile
import threading
import time
import types
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from trapline.arena.certify import red_team
from trapline.arena.errors import Violation
from trapline.arena.judge import measure
from trapline.arena.process import sandbox, session, wire
from trapline.arena.process.isolation.running import descendants
from trapline.arena.process.proxy import Submission, TimedCall
from trapline.arena.process.sandbox import Launch, SandboxLimits
from trapline.arena.process.transcript import Transcript
from trapline.arena.record import Dimension

JUDGES = Path(__file__).with_name("judges")
#: Nothing waits longer for something that is bound to happen.
PATIENCE = 120.0
nothing = contextlib.nullcontext


def as_json(header):
    return json.dumps(header).encode()


@contextmanager
def laid_out(cheat):
    """A folder with the attack's files."""
    with tempfile.TemporaryDirectory(prefix="trapline-") as name:
        for path, content in cheat.files.items():
            Path(name, path).write_text(content)
        yield Path(name)


@contextmanager
def started(bench, cheat):
    """The attack in a worker of its own."""
    with (
        laid_out(cheat) as folder,
        Submission(folder, bench.challenge.sandbox_config(bench.level)) as submission,
    ):
        yield submission


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def graded(bench, cheat):
    """Like any submission."""
    return red_team.attempt(cheat, bench.challenge, bench.level, bench.seed).gained


def graded_twice(bench, cheat):
    """Again, after a first grade has left behind what it could."""
    graded(bench, cheat)
    return graded(bench, cheat)


def standing(bench, cheat):
    """Like any submission, by a judge that may fall."""
    try:
        return graded(bench, cheat)
    except Exception as error:
        return f"it broke the judge: {error}"


def measured(cheat, **scores):
    """What these scores are to an attack that may solve the task."""
    dimensions = {name: Dimension(score=score, reason="") for name, score in scores.items()}
    cell = types.SimpleNamespace(
        state="pass", score=100.0, dimensions=dimensions, model_dump_json=lambda: ""
    )
    return red_team._gain(cheat, cell)


# --- judges that believe what they are told from inside ------------------------------------------


def judged_by(program):
    """By a judge inside the sandbox, beside the submission."""

    def judge(bench, cheat):
        with laid_out(cheat) as folder:
            ours, theirs = socket.socketpair()
            limits = SandboxLimits(memory_mb=256, processes=16)
            running = sandbox.launch(Launch(bench.level, JUDGES / program, folder, theirs, limits))
            with ours:
                try:
                    report = believe(ours, running)
                finally:
                    running.kill()
        if report["state"] == "pass" and cheat.expect != "pass":
            return "it passed"
        score = measure._log_score(1 / report.get("ratio", 1.0), best=1.0, worst=10.0)
        return measured(cheat, **dict.fromkeys(cheat.at_most, score)) if cheat.at_most else ""

    return judge


def believe(channel, running):
    """The first verdict on the channel, or else what the exit code says."""
    frames = wire.Channel(channel)
    try:
        while True:
            header, _ = frames.receive(time.monotonic() + PATIENCE)
            if header.get("op") == "result":
                return header
    except wire.WireError:
        wait_until(lambda: not running.alive())
        return {"state": "pass" if running.reason() == "exited with code 0" else "fail"}


# --- time ----------------------------------------------------------------------------------------


class Clock:
    """Stands still unless somebody works or sleeps."""

    def __init__(self):
        self.now = 1.0

    def perf_counter(self):
        return self.now

    def thread_time(self):
        """The judge itself does no work here."""
        return 0.0

    def sleep(self, seconds):
        self.now += seconds


#: Seconds: a round trip, what lies between two bursts, the reference's work, the attack's.
TRIP, PAUSE, USUAL, SLOW = 0.0003, 0.02, 0.008, 0.05


def race(bench, cheat):
    """`measure.speed` on a clock of its own, with the attack's code in this process: it only
    computes and looks at that clock."""
    clock = Clock()
    module = types.ModuleType("solution")
    exec(compile(cheat.files["solution.py"], "solution.py", "exec"), module.__dict__)

    def work(seconds):
        def sort(values):
            clock.sleep(seconds)
            return np.sort(values)

        return sort

    module.time, module.honest_sort = clock, work(SLOW)
    prepare = bench.challenge.module("cases").speed

    def prepared(submission, rng):
        clock.sleep(PAUSE)
        return prepare(submission, rng)

    class Simulated:
        def __init__(self, sort, entry, args, kwargs, on):
            self.sort, self.args = sort, args

        def run(self):
            clock.sleep(TRIP)
            self.got = self.sort(*self.args)
            return ""

        def answer(self):
            return self.got

    replaced = {
        "time": clock,
        "TimedCall": Simulated,
        "paused": lambda _: nothing(),
        "kept_to": lambda *_: nothing(),
        "_processor_seconds": lambda _: clock.perf_counter(),
    }
    for name, value in replaced.items():
        bench.patch.setattr(measure, name, value)
    bench.patch.setattr(bench.challenge.module("cases"), "speed", prepared)
    racers = module.sort, work(USUAL)
    for racer in racers:
        racer.transcript = Transcript()
    try:
        rng = np.random.default_rng(3)
        dimension, _ = measure.speed(bench.challenge, *racers, rng, measure.QUICK_ROUNDS)
    except Violation:
        return measured(cheat, speed=0.0)
    return measured(cheat, speed=dimension.score)


def race_in_processes(bench, cheat):
    """A real race: the kernel counts."""
    config, rng = bench.challenge.sandbox_config(bench.level), np.random.default_rng(3)
    with started(bench, cheat) as one, Submission(bench.challenge.solution, config) as reference:
        racers = one, reference
        dimension, _ = measure.speed(bench.challenge, *racers, rng, measure.QUICK_ROUNDS)
    return measured(cheat, speed=dimension.score)


def race_beside(bench, cheat):
    """A real race: is the attack at work while the reference is timed? The kernel's count of its
    processor time says so on any machine, however busy; what it gains depends on the machine."""
    config, burst, worked = bench.challenge.sandbox_config(bench.level), measure._burst, []
    with started(bench, cheat) as one, Submission(bench.challenge.solution, config) as reference:

        def watched(racer, *others):
            before = processor_time(one.session.running.pid)
            done = burst(racer, *others)
            if racer is reference:
                worked.append(processor_time(one.session.running.pid) - before)
            return done

        bench.patch.setattr(measure, "_burst", watched)
        rng = np.random.default_rng(3)
        measure.speed(bench.challenge, one, reference, rng, measure.QUICK_ROUNDS)
    # The first is the warm-up, when everybody may still move.
    ticks = sum(worked[1:])
    return f"it worked for {ticks} ticks while the reference was timed" if ticks else ""


def processor_time(root):
    """Ticks of a process and all its descendants."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total


def answered_late(bench, cheat):
    """Is an answer what was sent, or what lies in the lent memory later?"""
    values = np.random.default_rng(3).standard_normal(1 << 18)
    want = np.sort(values)
    with started(bench, cheat) as submission:
        call = TimedCall(submission, "sort", (values,), {}, None)
        call.run()
        lent = submission.session._channel.take
        wait_until(lambda: lent.read(want.nbytes).tobytes() == want.tobytes())
        right = np.array_equal(call.answer(), want)
    return "its answer became right after the clock had stopped" if right else ""


def awaited(bench, cheat):
    """Does the judge ever come to a verdict?"""
    begun, gained, launch = [], [], session.launch
    bench.patch.setattr(session, "launch", lambda spec: begun.append(launch(spec)) or begun[-1])
    thread = threading.Thread(target=lambda: gained.append(graded(bench, cheat)))
    thread.start()
    wait_until(lambda: begun)
    # As long as the deadline would be, were there one, and then some.
    thread.join(PATIENCE if bench.importer.IMPORT_SECONDS < PATIENCE else 10.0)
    waits = thread.is_alive()
    while thread.is_alive():
        begun[-1].kill()
        thread.join(1.0)
    return "it kept the judge waiting" if waits else gained[0]


# --- memory of the judge -------------------------------------------------------------------------


def believed_length(bench, cheat):
    """The most that the judge takes memory for on a peer's word."""
    asked, read = [], wire.Channel._read

    def careful(channel, size, deadline):
        asked.append(size)
        if size > 1 << 30:
            raise wire.WireError("so much is not really taken")
        return read(channel, size, deadline)

    bench.patch.setattr(wire.Channel, "_read", careful)
    gained = graded(bench, cheat)
    return f"the judge takes {max(asked)} bytes" if max(asked) > 1 << 30 else gained


def kept_output(bench, cheat):
    """How much of what it prints the judge keeps."""
    with started(bench, cheat) as submission:
        running = submission.session.running
        with contextlib.suppress(Violation):
            submission.sort(np.zeros(3))
        running.kill()
        kept = len(running.output())
    return f"the judge keeps {kept} characters" if kept > 16 << 10 else ""


#: Attacks on time or on the judge's memory: these show with the defences on as well as off.
SPECIAL = {
    "one_in_three": race,
    "one_long_burst": race,
    "timed_size_detection": race,
    "warm_up_detection": race,
    "slow_the_reference": race_beside,
    "work_in_a_passing_process": race_in_processes,
    "lent_memory_race": answered_late,
    "endless_loop": awaited,
    "noise_on_the_channel": believed_length,
    "print_bomb": kept_output,
}
