"""The submission as checks see it: calls, objects, callbacks, views, and every way to fail."""

import time
from dataclasses import replace

import numpy as np
import pytest

from trapline.arena.errors import SubmissionDied, SubmissionHung, SubmissionRaised, Violation
from trapline.arena.judge import checks, expect
from trapline.arena.judge.checks import run_check
from trapline.arena.judge.traps import Case, case
from trapline.arena.process import session
from trapline.arena.process.local import LocalSubmission
from trapline.arena.process.proxy import Stub, Submission

SOURCE = """
    import os, sys, time
    import numpy as np

    CALLS = []

    class Box:
        def __init__(self, value): self.value = value
        def get(self): return self.value
        def put(self, value): self.value = value
        def same(self, other): return other is self

    def echo(*args, **kwargs): return (args, kwargs)
    def count(): CALLS.append(1); return len(CALLS)
    def strides(x): return list(x.strides)
    def box(value): return Box(value)
    def open_box(box): return box.value
    def spoil(x): x[...] = 0; return None
    def spoil_and_raise(x): x[...] = 0; raise ValueError("no")
    POOL = np.zeros(3)
    def pooled(x): POOL[...] = x; return POOL
    KEPT = {}
    def kept(x, other): return KEPT.setdefault((id(x), id(other)), x + other)
    def copied(x, other): return x.copy()
    def passed_on(x, other): return {"part": [other[1:]]}
    def ask(model, x): return model.predict(x) + 1
    def apply(function, x): return function(x)
    def refuse(kind): raise {"value": ValueError, "key": KeyError, "exit": SystemExit}[kind]("no")
    def crash(): os._exit(3)
    def hang(): time.sleep(100)
    def nap(seconds): time.sleep(seconds); return "awake"
    def spin():
        while True: pass
    def shout():
        for _ in range(20000): print("x" * 1000)
        return "done"
    def hog(): return len(np.ones(1 << 30).tobytes())
    def strange(): return {1: object}, {"a": np.array([object()], dtype=object)}
    class Derived(ValueError): pass
    def derived(): raise Derived("mine")
    class Sub(np.ndarray):
        def __eq__(self, other): return True
    def subclass(): return np.zeros(3).view(Sub)
    def flood(function):
        large = np.zeros(5 << 20)
        for _ in range(100): function(large)
    def mutter(): raise ValueError("a\\x00b\\x1b[2J\\udc80c")
    class Odd: pass
    Odd.__name__ = "O\\x1bdd"
    def odd(): return Odd()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import textwrap

    folder = tmp_path_factory.mktemp("proxy")
    (folder / "solution.py").write_text(textwrap.dedent(SOURCE))
    return folder


@pytest.fixture
def submission(folder, sorting, level):
    with Submission(folder, sorting.sandbox_config(level)) as submission:
        yield submission


def test_values_come_back_as_they_went(submission):
    x = np.arange(6.0).reshape(2, 3)
    args, kwargs = submission.echo(x, 3, 2.5, None, True, "ü", [1, (2, 3)], key={"a": np.int64(4)})
    assert np.array_equal(args[0], x)
    assert args[1:] == (3, 2.5, None, True, "ü", [1, (2, 3)])
    assert kwargs == {"key": {"a": 4}}
    assert isinstance(kwargs["key"]["a"], np.int64)


def test_views_stay_views(submission):
    x = np.zeros((8, 6), np.float32)[::2, ::-1]
    assert submission.strides(x) == list(x.strides)


def test_calls_share_a_process_and_fresh_starts_another(submission):
    assert [submission.count(), submission.count()] == [1, 2]
    assert submission.fresh().count() == 1
    submission.settle()
    assert submission.count() == 3


def test_fresh_takes_the_sandboxes_that_were_started_ahead(submission):
    with submission.fresh_ahead(2) as ahead:
        first, left = (waiting.result() for waiting in ahead._sessions)
        assert submission.fresh().count() == 1
        assert submission._fresh[0].session is first
        submission.settle()
    assert [first.closed, left.closed] == [True, True]
    assert ahead.taken == 1


def test_fresh_starts_what_was_not_started_ahead(submission):
    with submission.fresh_ahead(1) as ahead:
        assert [submission.fresh().count() for _ in range(3)] == [1, 1, 1]
        submission.settle()
    assert ahead.taken == 3


def test_objects_live_in_the_worker(submission):
    box = submission.box(7)
    box.put(np.ones(2))
    assert np.array_equal(submission.open_box(box), np.ones(2))
    assert box.same(box) is True
    assert "Box" in repr(box)


def test_object_dies_with_its_process(submission):
    box = submission.box(7)
    with pytest.raises(SubmissionDied):
        submission.crash()
    with pytest.raises(SubmissionDied, match="died with its process"):
        box.get()


@pytest.fixture(params=["sandbox", "local"])
def either(request, folder, sorting, submission):
    """In a sandbox, and as our mutants run."""
    if request.param == "sandbox":
        yield submission
        return
    config = replace(sorting.sandbox_config("process"), call_seconds=0.2)
    with LocalSubmission(folder, config) as local:
        yield local


def test_calls_in_one_message_answer_and_record_as_single_ones_do(either):
    box = either.box(1)
    asks = [(None, "count", ()), (box, "put", (np.arange(3),)), (box, "get", ())]
    either.transcript.exchanges.clear()
    counted, nothing, array = either.call_all(asks)
    assert (counted, nothing, array.tolist()) == (1, None, [0, 1, 2])
    said = either.transcript.exchanges
    assert [(e.on, e.entry) for e in said] == [(on, entry) for on, entry, _ in asks]
    assert [e.returned for e in said] == [True] * 3
    assert list(either.call_all([])) == []


def test_each_answer_of_a_message_is_as_it_was_when_given(either):
    first, second = either.call_all([(None, "pooled", (1.0,)), (None, "pooled", (2.0,))])
    assert (first.tolist(), second.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_caller_that_fills_its_arrays_anew_gets_what_was_kept_by_their_identity(either):
    either.transcript.exchanges.clear()
    calls = [(np.full(3, n), np.ones(3)) for n in (1.0, 2.0)]
    assert [answer.tolist() for answer in either.refilled("kept", *calls)] == [[2.0] * 3] * 2
    copies = either.refilled("copied", *calls)
    assert [answer.tolist() for answer in copies] == [[1.0] * 3, [2.0] * 3]
    said = either.transcript.exchanges
    assert [(e.entry, e.refilled) for e in said] == [("kept", True)] * 2 + [("copied", True)] * 2


def test_calls_of_a_message_end_with_the_first_that_raises(either):
    either.transcript.exchanges.clear()
    answers = either.call_all(
        [(None, "count", ()), (None, "refuse", ("key",)), (None, "count", ())]
    )
    assert next(answers) == 1
    with pytest.raises(SubmissionRaised, match="KeyError"):
        next(answers)
    assert [e.raised for e in either.transcript.exchanges] == ["", "KeyError"]
    assert either.count() == 2


def test_death_in_a_message_is_recorded_with_its_last_call(either):
    either.config = replace(either.config, call_seconds=0.2)
    either.transcript.exchanges.clear()
    with pytest.raises(SubmissionDied, match="no answer within"):
        list(either.call_all([(None, "count", ()), (None, "hang", ()), (None, "count", ())]))
    assert [bool(e.died) for e in either.transcript.exchanges] == [False, False, True]


def test_later_calls_travel_with_the_next_one_and_are_recorded_before_it(either, monkeypatch):
    box, sent = either.box(1), []
    ask_all = either._ask_all
    monkeypatch.setattr(either, "_ask_all", lambda asks: sent.append(len(asks)) or ask_all(asks))
    either.transcript.exchanges.clear()
    either.call_later([(box, "put", (2,))])
    either.call_later([(None, "count", ())])
    assert (box.get(), sent) == (2, [3])
    assert [e.entry for e in either.transcript.exchanges] == ["put", "count", "get"]


def test_later_calls_are_made_before_calls_with_keywords_or_a_look_at_memory(either):
    for expected, call in enumerate(
        (lambda: either.echo(a=1), lambda: either.observe("echo"), lambda: either.sharing("echo"))
    ):
        either.call_later([(None, "count", ())])
        call()
        assert either.count() == 2 * expected + 2


def test_what_a_later_call_raises_is_not_taken_for_an_expected_refusal(either):
    either.call_later([(None, "refuse", ("key",))])
    with pytest.raises(Violation, match="KeyError") as caught:
        expect.raises(KeyError, either.refuse, "key")
    assert not isinstance(caught.value, SubmissionRaised)
    assert [e.raised for e in either.transcript.exchanges] == ["KeyError"]


def test_check_that_ends_with_a_later_call_fails_if_it_raises(either):
    @case
    def ends_early(submission, _rng):
        submission.call_later([(None, "refuse", ("value",))])

    result = run_check(ends_early, either, 1)
    assert (result.state, "ValueError" in result.message) == ("fail", True)


def test_later_calls_of_a_failed_check_are_forgotten(either):
    @case
    def fails(submission, _rng):
        submission.call_later([(None, "count", ())])
        raise Violation("wrong")

    assert run_check(fails, either, 1).state == "fail"
    assert either.count() == 1


def test_endless_loop_is_known_by_its_processor_time(submission):
    submission.config = replace(submission.config, call_seconds=60, processor_share=0.005)
    started = time.monotonic()
    with pytest.raises(SubmissionHung, match="no answer within 60 s"):
        submission.spin()
    assert time.monotonic() - started < 30
    assert submission.lost_seconds == 60


def test_call_that_waits_uses_no_processor_time(submission):
    submission.config = replace(submission.config, call_seconds=60, processor_share=0.005)
    assert submission.ask(Stub(predict=lambda x: time.sleep(0.6) or x), 3) == 4
    assert submission.nap(0.6) == "awake"


def test_bad_input_ends_after_a_small_share_of_the_limit(submission, monkeypatch):
    monkeypatch.setattr(checks, "REFUSAL_SHARE", 0.005)
    submission.config = replace(submission.config, call_seconds=60)
    started = time.monotonic()
    refused = run_check(Case("refused", spins, dimension="robustness"), submission, 0)
    assert time.monotonic() - started < 30
    assert (refused.state, refused.message) == ("fail", "no answer within 60 s")


def test_ordinary_call_has_its_whole_limit(submission, monkeypatch):
    monkeypatch.setattr(checks, "REFUSAL_SHARE", 0.005)
    submission.config = replace(submission.config, call_seconds=1.5)
    run_check(Case("refused", lambda submission, rng: None, dimension="robustness"), submission, 0)
    started = time.monotonic()
    assert run_check(Case("ordinary", spins), submission, 0).state == "fail"
    assert time.monotonic() - started >= 1.5


def spins(submission, rng):
    """The answer loops without end, in another process too."""
    submission.fresh().spin()


@pytest.mark.parametrize("values", ["None", "[1]", "[1, 2, 3]"])
def test_message_with_a_wrong_number_of_answers_is_a_death(
    submission_folder, sorting, level, values
):
    folder = submission_folder(f"""
        import __main__
        honest = __main__.Worker.send
        def send(self, header, buffers=()):
            honest(self, {{**header, "values": {values}}} if "values" in header else header)
        __main__.Worker.send = send
        def one(): return 1
    """)
    with Submission(folder, sorting.sandbox_config(level)) as submission:
        with pytest.raises(SubmissionDied, match="the answers did not come back"):
            list(submission.call_all([(None, "one", ())] * 2))
        assert submission.one() == 1


def test_callbacks_run_on_our_side_and_are_counted(submission):
    model = Stub(predict=lambda x: x * 2)
    assert submission.ask(model, 4) == 9
    assert model.calls == [("predict", (4,))]
    assert submission.apply(Stub(lambda x: x.sum()), np.ones(3)) == 3.0


def test_exception_of_a_stub_reaches_the_submission(submission):
    def refuse(x):
        raise ValueError("not this")

    with pytest.raises(SubmissionRaised, match="ValueError: not this"):
        submission.apply(Stub(refuse), 1)


def test_violation_in_a_stub_fails_the_check_and_the_submission_recovers(submission):
    def judge(x):
        expect.that(False, "a wrong argument")

    with pytest.raises(Violation, match="a wrong argument"):
        submission.apply(Stub(judge), 1)
    assert submission.echo(1) == ((1,), {})


def test_modified_inputs_are_seen(submission):
    _, (after,) = submission.observe("spoil", np.ones(3))
    assert np.array_equal(after, np.zeros(3))


def test_inputs_modified_by_a_call_that_raises_are_seen(submission):
    with pytest.raises(SubmissionRaised) as raised:
        submission.observe("spoil_and_raise", np.ones(3))
    (after,) = raised.value.left
    assert np.array_equal(after, np.zeros(3))


@pytest.mark.parametrize("local", [False, True])
def test_memory_that_an_answer_shares_is_reported(submission, folder, local):
    one = LocalSubmission(folder, submission.config) if local else submission
    arrays = np.ones(3), np.ones(3)
    for entry, places in (("copied", set()), ("passed_on", {1})):
        _, shared = one.sharing(entry, *arrays)
        assert (shared.arguments, shared.earlier_answer) == (places, False)
    box = one.box(np.zeros(2))
    for array, places in ((arrays[0], {0}), (3, set())):
        _, shared = one.sharing("put", array, on=box)
        assert shared.arguments == places
    for before in (False, True):
        _, shared = one.sharing("pooled", arrays[0])
        assert shared.earlier_answer is before


def test_exceptions_are_data(submission):
    expect.raises(ValueError, lambda: submission.refuse("value"))
    expect.raises(ValueError, lambda: submission.derived())
    with pytest.raises(Violation, match="KeyError"):
        expect.raises(ValueError, lambda: submission.refuse("key"))
    with pytest.raises(Violation, match="accepted"):
        expect.raises(ValueError, lambda: submission.echo(1))
    with pytest.raises(SubmissionRaised, match="SystemExit"):
        submission.refuse("exit")
    with pytest.raises(SubmissionRaised, match="AttributeError"):
        submission.no_such_function()


@pytest.mark.parametrize("how", ["crash", "hang", "hog"])
def test_death_is_a_violation_and_the_next_call_restarts(submission, how):
    with pytest.raises(Violation):
        getattr(submission, how)()
    assert submission.echo(1) == ((1,), {})


def test_deaths_are_counted(submission):
    with pytest.raises(SubmissionDied, match="code 3"):
        submission.crash()
    assert submission.deaths == 1


def test_output_does_not_disturb_calls(submission):
    assert submission.shout() == "done"


def test_array_subclass_arrives_as_a_plain_array(submission):
    answer = submission.subclass()
    assert type(answer) is np.ndarray
    with pytest.raises(Violation):
        expect.equal(answer, np.ones(3))


def test_objects_inside_containers_and_object_arrays(submission):
    with pytest.raises(SubmissionRaised, match="dtype object"):
        submission.strange()


def test_flood_of_callbacks_ends_before_it_fills_our_memory(submission, monkeypatch):
    monkeypatch.setattr(session, "MAX_CALLED_BACK", 100 << 20)
    submission.config = replace(submission.config, call_seconds=60.0)
    stub = Stub(lambda values: None)
    with pytest.raises(SubmissionDied, match="called back with more than 100 MiB"):
        submission.flood(stub)
    assert 1 <= len(stub.calls) <= 2


def test_messages_of_a_submission_are_printable(submission):
    with pytest.raises(SubmissionRaised) as caught:
        submission.mutter()
    assert caught.value.message == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[2J?c"
    assert "\x1b" not in repr(submission.odd())


FORGERS = {
    "on import": "os.write(channel(), b'TRPL' + struct.pack('<IQ', 2, 0) + b'{}')\ndef f(): pass",
    "in a call": "def f(): os.write(channel(), b'TRPL' + struct.pack('<IQ', 2, 0) + b'{}')",
}
CHANNEL = """
import os, stat, struct
def channel():
    return next(fd for fd in range(3, 64) if is_socket(fd))
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
"""


@pytest.mark.parametrize("when", FORGERS)
def test_forged_frame_is_noted_wherever_it_was_sent(submission_folder, sorting, level, when):
    """Also in the processes that a check or a measure asks for."""
    folder = submission_folder(CHANNEL + FORGERS[when])
    with Submission(folder, sorting.sandbox_config(level)) as submission:
        with pytest.raises(SubmissionDied):
            submission.fresh().f()
        submission.settle()
        assert len(submission.forgeries) == 1


#: Sends more bytes after each answer, in the same piece.
TRAILER = """
import sys
class Longer:
    def __init__(self, sock): self.sock = sock
    def __getattr__(self, name): return getattr(self.sock, name)
    def sendall(self, data): self.sock.sendall(bytes(data) + b"TRPL")
def f():
    worker = sys._getframe(1).f_locals["self"]
    worker.channel.sock = Longer(worker.channel.sock)
    return 1
"""


def test_bytes_that_come_along_with_an_answer_are_noted(submission_folder, sorting, level):
    with Submission(submission_folder(TRAILER), sorting.sandbox_config(level)) as submission:
        assert submission.f() == 1
        with pytest.raises(SubmissionDied, match="spoke before it was asked"):
            submission.f()
        assert len(submission.forgeries) == 1
