"""Every defence of the judge that a test can switch off, by the name that attacks use in their
headers; the sandbox's are in `sandbox_switches.py`.

A switch replaces the one function (or line of a program inside) that is the defence; what it
replaces is ours, on our side of the wall, so the attack itself stays as it is. Nothing here is
reachable from the package.
"""

from dataclasses import replace
from types import SimpleNamespace

import benches
import numpy as np
from bench import ARENA, COMMON, Switches

from trapline.arena.judge import checks, expect, grade, intake, measure, own_tests
from trapline.arena.judge.traps import Case
from trapline.arena.process import session, wire
from trapline.arena.process.isolation import cgroups, running
from trapline.arena.process.proxy import Submission
from trapline.arena.record import Dimension

SWITCHES = switch = Switches(COMMON)


# --- where the verdict is reached, and on what ---------------------------------------------------


@switch("verdict-outside")
def verdict_inside(bench):
    bench.judge = benches.judged_by("same_process.py")


@switch("no-unpickling")
def unpickling(bench):
    bench.judge = benches.judged_by("unpickling.py")


@switch("unforeseen-answers")
def stumble(bench):
    def fall(error):
        raise error

    bench.patch.setattr(checks, "unexaminable", fall)
    bench.judge = benches.standing


@switch("adapters-by-profile")
def load_any_adapter(bench):
    def config(request, challenge, taken):
        usual = challenge.sandbox_config(request.level)
        return replace(usual, entry="adapter" if "adapter.py" in taken.files else usual.entry)

    bench.patch.setattr(grade, "_config", config)


@switch("log-left-out")
def take_the_log_in(bench):
    bench.patch.setattr(intake, "SESSION", "")


# --- how answers are compared --------------------------------------------------------------------


def compare(bench, agree):
    def equal(got, want, what="the answer"):
        if not isinstance(want, np.ndarray):
            return expect.that(type(got) is type(want) and agree(got, want), what)
        expect.array(got, shape=want.shape, dtype=want.dtype)
        return expect.that(agree(got, want), what)

    bench.patch.setattr(expect, "equal", equal)


@switch("values-compared")
def compare_shapes(bench):
    compare(bench, lambda got, want: True)


@switch("every-element-compared")
def compare_the_beginning(bench):
    def agree(got, want):
        part = slice(np.size(want) // 4) if np.ndim(want) else ...
        return np.array_equal(np.asarray(got)[part], np.asarray(want)[part])

    compare(bench, agree)


@switch("nan-is-no-number")
def compare_differences(bench):
    compare(bench, lambda got, want: not np.any(np.abs(np.subtract(got, want)) > 1e-9))


@switch("exact-values")
def compare_loosely(bench):
    compare(bench, lambda got, want: np.allclose(got, want, atol=1e-2))


@switch("own-copy-of-inputs")
def share_inputs(bench):
    def call(self, entry, args, kwargs, on=None):
        answer, after = self.observe(entry, *args, **kwargs)
        for mine, theirs in zip(args, after, strict=True):
            mine[...] = theirs
        return answer

    bench.patch.setattr(Submission, "call", call)


# --- what is asked -------------------------------------------------------------------------------


@switch("unknown-seed")
def guessable_seed(bench):
    bench.seed = 7


@switch("lengths-of-every-kind")
def round_lengths(bench):
    def sorts(submission, rng):
        for count in (1, 2, 64, 256, 1024):
            values = rng.standard_normal(count)
            expect.equal(submission.sort(values), np.sort(values))

    others = [case for case in bench.challenge.cases if not case.id.startswith("sorts")]
    bench.patch.setattr(bench.challenge, "cases", [Case("sorts", sorts), *others])


# --- the wire ------------------------------------------------------------------------------------


@switch("own-copy-of-answers")
def look_at_lent_memory(bench):
    bench.patch.setattr(wire.Lender, "read", lambda lender, size: lender._bytes[:size])


@switch("deadline")
def wait_for_ever(bench):
    bench.patch.setattr(session, "IMPORT_SECONDS", 1e6)


@switch("bounded-output")
def keep_output(bench):
    bench.patch.setattr(running, "_KEPT_OUTPUT", 1 << 22)


# --- measures ------------------------------------------------------------------------------------


@switch("timed-answers-checked")
def time_only(bench):
    bench.patch.setattr(measure.TimedAnswer, "check", lambda answer: None)


@switch("least-share")
def believe_processor_time(bench):
    bench.patch.setattr(measure, "LEAST_SHARE", 0.0)


@switch("ended-processes-counted")
def forget_ended_processes(bench):
    bench.patch.setattr(cgroups.Group, "processor_seconds", lambda group: None)


@switch("pausing")
def nobody_stands_still(bench):
    bench.patch.setattr(measure, "paused", lambda others: benches.nothing())


@switch("idle-memory-counts")
def forgive_idle_memory(bench):
    bench.patch.setattr(measure, "IDLE_ALLOWANCE", 1 << 40)


# --- own tests and code --------------------------------------------------------------------------


def after_inspection(bench, change):
    inspect = grade.inspect
    bench.patch.setattr(grade, "inspect", lambda *args: change(inspect(*args)))


@switch("rewrites")
def no_rewrites(bench):
    after_inspection(bench, lambda found: found.model_copy(update={"rewrites": {}}))


@switch("padded-rewrite")
def no_padding(bench):
    def unpadded(found):
        kept = {name: text for name, text in found.rewrites.items() if name != "padded"}
        return found.model_copy(update={"rewrites": kept})

    after_inspection(bench, unpadded)


@switch("random-order-of-runs")
def foreseeable_runs(bench):
    draw = SimpleNamespace(shuffle=lambda runs: None)
    bench.patch.setattr(own_tests, "secrets", SimpleNamespace(SystemRandom=lambda: draw))


@switch("mutants-noticed")
def passing_is_enough(bench):
    share = Dimension(score=own_tests.PASSING_SHARE, reason="passes on its own code")
    bench.patch.setattr(own_tests, "_by_kills", lambda own, killed: share)


@switch("no-conftest")
def load_conftest(bench):
    bench.edit(ARENA / "judge" / "tester.py", ('"--noconftest", ', ""))


@switch("comments-ignored")
def obey_comments(bench):
    bench.edit(ARENA / "judge" / "inspector.py", ('        "--ignore-noqa",\n', ""))


@switch("code-from-data")
def trust_what_is_shown(bench):
    program = ARENA / "judge" / "code_from_data.py"
    bench.edit(program, ("    return found + sorted(_files(folder))", "    return []"))


@switch("forbidden-names")
def forbid_nothing(bench):
    bench.patch.setattr(grade, "forbidden_uses", lambda inspection, forbidden: [])


@switch("readable-code")
def pass_unread(bench):
    unread = {"code": {"imports": []}}
    after_inspection(bench, lambda found: found.model_copy(update=unread if not found.code else {}))
