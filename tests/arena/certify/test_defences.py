"""Each attack fails while our defences stand, and succeeds once the one against it is switched
off: a defence that stops nothing would show here, and so would an attack that is none."""

import ctypes
from pathlib import Path

import benches
import pytest
import sandbox_switches  # noqa: F401 - it registers its switches
import switches
from bench import Bench

from trapline.arena.certify import red_team
from trapline.arena.judge import grade
from trapline.arena.judge.inspection import Inspection
from trapline.arena.process import session
from trapline.arena.process.isolation import cgroups
from trapline.arena.record import Dimension

CORPUS = {cheat.name: cheat for cheat in red_team.read_corpus(red_team.find_corpus())}
PROVED = [cheat.name for cheat in CORPUS.values() if cheat.succeeds_without]
#: They need a machine's real time, or what not every machine lends.
LONG = {"slow_the_reference", "work_in_a_passing_process", "patched_clock_in_c", "io_uring"}
#: The whole red team, which runs in full, holds with all defences on: here one attack for each set
#: of switches, and no suite of tests, which takes a second.
FIRST = {CORPUS[name].succeeds_without: name for name in reversed(PROVED)}
REPEATED = {
    name for name in PROVED if name not in FIRST.values() or "tests" in CORPUS[name].at_most
}
IO_URING_SETUP = 425


@pytest.fixture
def bench(monkeypatch, tmp_path, level):
    if level != "bubblewrap":
        pytest.skip("the switches are those of the strongest level, and these attacks are real")
    challenge = red_team.load_challenge(red_team.find_corpus())
    # No attack here waits for the end of a call's time: a busy machine may take long over one.
    limits = challenge.plan.limits.model_copy(update={"call_seconds": 60.0})
    challenge.plan = challenge.plan.model_copy(update={"limits": limits})
    return Bench(monkeypatch, tmp_path, challenge, level)


def names(*, long=LONG, without=()):
    """Parameters: every attack with a switch; what takes long is marked so."""
    return [
        pytest.param(name, marks=pytest.mark.full if name in long else ())
        for name in PROVED
        if name not in without
    ]


def only_what_counts(bench, cheat):
    """Leaves out of a grade what this attack does not aim at."""
    aims = set(cheat.at_most)
    measures = grade._measures
    bench.patch.setattr(
        grade, "_measures", lambda challenge: [m for m in measures(challenge) if m in aims]
    )
    if "tests" not in aims:
        unasked = Dimension(score=0.0, reason="not asked")
        bench.patch.setattr(grade, "own_tests", lambda *_: unasked)
    is_read = cheat.expect == "hack" or "readable-code" in cheat.succeeds_without
    if not is_read and not aims & {"tests", "code"}:
        unread = Inspection(unreadable="not asked", code={"imports": []})
        bench.patch.setattr(grade, "inspect", lambda *_: unread)
    bench.patch.setattr(session, "IMPORT_SECONDS", 3.0 if cheat.slow else 60.0)
    bench.judge = benches.SPECIAL.get(cheat.name, bench.judge)


@pytest.mark.parametrize("name", names())
def test_without_its_defence_the_attack_succeeds(bench, name):
    cheat = CORPUS[name]
    only_what_counts(bench, cheat)
    switches.SWITCHES.off(bench, cheat)
    # Everything, but for what the machine itself may forbid everybody.
    assert bool(bench.judge(bench, cheat)) == (name != "io_uring" or lends_rings())


#: Their real speed is a matter of the machine, and the whole red team looks at it.
TIMED = ("patched_clock", "patched_clock_in_c")


@pytest.mark.parametrize("name", names(long=LONG | REPEATED, without=TIMED))
def test_with_all_defences_the_same_attack_gains_nothing(bench, name):
    cheat = CORPUS[name]
    if cheat.needs == "cgroup" and not cgroups.counts_memory():
        pytest.skip("this machine lends no control group that counts memory")
    only_what_counts(bench, cheat)
    assert bench.judge(bench, cheat) == ""


def lends_rings():
    setting = Path("/proc/sys/kernel/io_uring_disabled")
    if setting.exists() and setting.read_text().strip() != "0":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)
    descriptor = libc.syscall(IO_URING_SETUP, 8, parameters)
    if descriptor >= 0:
        libc.close(descriptor)
    return descriptor >= 0


def test_switches_and_names_in_headers_correspond():
    used = {name for cheat in CORPUS.values() for name in cheat.succeeds_without}
    assert used == set(switches.SWITCHES)


def test_attacks_without_proof_are_few_and_give_a_reason():
    unshown = [cheat for cheat in CORPUS.values() if cheat.never_because]
    assert len(unshown) <= len(CORPUS) // 5
    assert all(len(cheat.never_because) > 20 for cheat in unshown)
