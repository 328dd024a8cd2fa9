"""Processes that run our mutants serve one answer after the other and keep nothing between them."""

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trapline.arena.challenge import load
from trapline.arena.errors import ArenaError
from trapline.arena.judge import mutants
from trapline.arena.judge.in_order import InOrder
from trapline.arena.judge.mutants import BOTH, GOLD, MOST_SPARE, MutantHost, _files, _spare
from trapline.arena.judge.shared_runs import SharedRuns

#: Says how often it has been called.
COUNTS = """
calls = []

def layer_norm_forward(*given, **named):
    calls.append(0)
    raise RuntimeError(f"call {len(calls)}")

def layer_norm_backward(*given, **named):
    pass
"""


@pytest.fixture(autouse=True)
def _no_spare_processes():
    _spare.end_all()
    yield
    _spare.end_all()


@pytest.fixture(scope="module")
def challenge():
    return load("layer_norm_backward")


def test_the_next_host_gets_the_process_without_its_subjects(challenge):
    check = challenge.cases[0].id
    pids, messages = [], []
    for _ in range(2):
        with MutantHost(challenge, 3) as host:
            runs = [host.run_files({"solution.py": COUNTS}, check) for _ in range(2)]
            messages.append([run.message for run in runs])
            pids.append(host._running.process.pid)
    assert pids[0] == pids[1]
    assert messages[0] == messages[1]
    assert ["call 1" in messages[0][0], "call 2" in messages[0][1]] == [True, True]


def test_a_process_that_owes_an_answer_is_ended(challenge):
    with MutantHost(challenge, 3) as host:
        running = host._running = _spare.take()
        running.owes = True
    assert running.process.poll() is not None
    assert not Path(running.folder.name).exists()
    assert not _spare._waiting


def test_few_processes_wait(challenge):
    taken = [_spare.take() for _ in range(MOST_SPARE + 1)]
    for running in taken:
        _spare.give(running)
    assert sum(running.process.poll() is None for running in taken) == MOST_SPARE


def test_mutants_have_one_thread(challenge):
    with MutantHost(challenge, 3) as host:
        host.run(GOLD, challenge.cases[0].id)  # before it answers, its environment may be empty
        pid = host.start().process.pid
        given = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8").split("\0")
    assert "OPENBLAS_NUM_THREADS=1" in given


def test_processes_that_a_check_starts_leave_room_for_later_runs():
    """Each left address space behind, until a right answer met the limit of its memory."""
    with MutantHost(load("flash_attention_forward"), seed=11) as host:
        runs = [host.run_again(GOLD, "mask-kept-between-calls") for _ in range(9)]
    assert [run.message for run in runs] == [""] * 9


def test_bugs_can_be_planted_together_unless_they_edit_the_same_text(challenge):
    host, forms = MutantHost(challenge, 3), list(challenge.forms)[:12]
    subjects = [BOTH.join((*forms[:n], form)) for n in (0, 1, 3) for form in forms[n:]]
    found = {}
    for subject in subjects:
        try:
            found[subject] = bool(_files(challenge, subject))
        except ArenaError:
            found[subject] = False
    assert {True, False} == set(found.values())
    assert {subject: host.can_plant(subject) for subject in subjects} == found


@pytest.fixture
def asked(monkeypatch):
    """What processes were asked: pairs of subject and check."""
    asked, ask = [], MutantHost._ask_for_bytes

    def noting(host, subject, check, **how):
        asked.append((subject, check))
        return ask(host, subject, check, **how)

    monkeypatch.setattr(MutantHost, "_ask_for_bytes", noting)
    monkeypatch.setattr(mutants, "_shared", SharedRuns())
    return asked


def run_twice(challenge, subject, check, seeds=(3, 3), *, shared=True):
    """The runs of two hosts, one for each answer that is graded."""
    runs = []
    for seed in seeds:
        with MutantHost(challenge, seed, shared=shared) as host:
            runs.append(host.run(subject, check))
            assert host.runs == 1
    return runs


def test_answers_with_one_seed_share_the_runs_of_mutants(challenge, asked):
    form, check = next(iter(challenge.forms)), challenge.cases[0].id
    for subject in (GOLD, form):
        first, second = run_twice(challenge, subject, check)
        assert pickle.dumps(first) == pickle.dumps(second)
    assert asked == [(GOLD, check), (form, check)]


def in_order_with_counts(challenge, host):
    """Four checks of a subject that says how often it has been called, and these checks."""
    checks = [case.id for case in challenge.cases[:4]]
    return InOrder(host, {"solution.py": COUNTS}, checks, checks), checks


def test_checks_in_order_are_asked_no_further_than_needed(challenge):
    with MutantHost(challenge, 3) as host:
        in_order, checks = in_order_with_counts(challenge, host)
        assert "call 1" in in_order.run(checks[0]).message
        assert host.runs == 1
        assert "call 3" in in_order.run(checks[2]).message
        assert "call 2" in in_order.run(checks[1]).message
        assert host.runs == 3


def test_what_is_asked_besides_leaves_the_state_of_checks_in_order(challenge):
    with MutantHost(challenge, 3) as host:
        in_order, checks = in_order_with_counts(challenge, host)
        in_order.run(checks[0])
        assert "call 1" in host.run_files({"solution.py": COUNTS}, checks[0]).message
        assert "call 2" in in_order.run(checks[1]).message


def test_checks_in_order_start_again_where_another_subject_ended_the_process(challenge):
    with MutantHost(challenge, 3) as host:
        in_order, checks = in_order_with_counts(challenge, host)
        in_order.run(checks[1])
        host.start().end()
        host._running = None
        host.run(GOLD, checks[0])
        assert "call 3" in in_order.run(checks[2]).message


def test_check_in_order_that_hangs_is_asked_once(challenge, monkeypatch):
    in_time, asked = mutants._answers_in_time, []

    def second_hangs(process):
        asked.append(process)
        return in_time(process) and len(asked) != 2

    monkeypatch.setattr(mutants, "_answers_in_time", second_hangs)
    with MutantHost(challenge, 3) as host:
        in_order, checks = in_order_with_counts(challenge, host)
        assert in_order.run(checks[1]) is mutants.HUNG
        host.run(GOLD, checks[0])
        assert "call 1" in in_order.run(checks[2]).message
        assert len(asked) == 4


def test_of_checks_asked_for_their_state_no_answers_come(challenge):
    ordinary = [case.id for case in challenge.cases[:2]]
    with MutantHost(challenge, 3) as host:
        in_order = InOrder(host, GOLD, ordinary, ordinary[1:])
        found = [in_order.run(check) for check in ordinary]
        alone = host.run(GOLD, ordinary[1])
    assert [bool(run.transcript.exchanges) for run in found] == [False, True]
    answers = [
        [exchange.entry for exchange in run.transcript.exchanges] for run in (found[1], alone)
    ]
    assert answers[0] == answers[1]


def test_answers_with_other_seeds_share_nothing(challenge, asked):
    check = challenge.cases[0].id
    run_twice(challenge, GOLD, check, seeds=(3, 4))
    run_twice(challenge, GOLD, check, shared=False)
    assert len(asked) == 4


def test_mutants_that_keep_state_are_asked_for_each_answer(asked):
    challenge = load("flash_attention_forward")
    form = next(form for form, trap in challenge.forms.items() if trap.keeps_state)
    run_twice(challenge, form, challenge.cases[0].id)
    assert len(asked) == 2


def test_of_shared_runs_those_not_asked_for_longest_go_first():
    shared = SharedRuns(most_bytes=10)
    for key in "ab":
        shared.put(key, bytes(4))
    shared.get("a")
    shared.put("c", bytes(4))
    assert [shared.get(key) is not None for key in "abc"] == [True, False, True]
    shared.put("d", bytes(11))
    assert [shared.get(key) for key in "abcd"] == [None] * 4
    shared.put("e", bytes(10))
    assert shared.get("e") is not None


def test_what_is_being_made_is_not_made_twice():
    shared, begun, made = SharedRuns(), threading.Event(), []

    def make():
        made.append(1)
        begun.set()
        time.sleep(0.2)
        return b"run"

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared.once, "key", make)
        begun.wait()
        second = pool.submit(shared.once, "key", make)
        assert [first.result(), second.result(), made] == [b"run", b"run", [1]]


def test_what_failed_is_made_again_for_the_next():
    shared = SharedRuns()
    with pytest.raises(ArenaError):
        shared.once("key", lambda: load("no such challenge"))
    assert shared.once("key", lambda: None) is None
    assert shared.once("key", lambda: b"run") == b"run"
    assert shared._making == {}


def test_check_that_counts_for_its_state_alone_starts_no_process():
    challenge, check = load("flash_attention_forward"), "score-matrix-in-memory"
    with MutantHost(challenge, 3) as host:
        assert not InOrder(host, GOLD, [check], {check}).run(check).failed
        left_out = InOrder(host, GOLD, [check], ()).run(check)
    assert left_out.message == "no further process is started"
