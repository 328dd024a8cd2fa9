"""Which of several causes leads: a pattern that fits, state between calls, equal messages."""

import ast
from dataclasses import replace

import corpus
import pytest

from trapline.arena.certify.diagnosis import DiagnosisCertifier
from trapline.arena.challenge import load
from trapline.arena.judge.answers import Answers
from trapline.arena.judge.diagnosis import MOST_CANDIDATES, Diagnoser
from trapline.arena.judge.failures import Failure
from trapline.arena.judge.findings import Report
from trapline.arena.judge.patterns import Patterns
from trapline.arena.process.transcript import Transcript
from trapline.arena.runs.field import EXAMPLE_FIELD as FIELD

NAME = "fused_softmax_topk"


def causes(name, files, seed=corpus.SEED):
    return [finding.cause for finding in found_in(name, files, seed)]


def found_in(name, files, seed):
    challenge = load(name)
    with DiagnosisCertifier(challenge, seed) as certifier:
        host = certifier.host(seed)
        failures = list(certifier.failures(host, files, ()))
        return Diagnoser(challenge, host, failures).diagnose().findings


def with_function_of(entrant, challenge, name):
    """The files of the gold solution, in which an example answer's function takes the place."""
    files = load(challenge).solution_files()
    theirs = (FIELD / entrant / challenge / "solution.py").read_text()
    (node,) = [node for node in ast.parse(theirs).body if getattr(node, "name", "") == name]
    files["solution.py"] += f"\n\n{ast.get_source_segment(theirs, node)}\n"
    return files


@pytest.mark.parametrize(
    ("function", "seed", "bugs"),
    [
        # Its sort is not stable; reversed ties were named if those of a draw came out reversed.
        ("build_tree", 7, ["tie-parent-before-depth", "ties-in-any-order"]),
        ("build_tree", 303, ["tie-parent-before-depth", "ties-in-any-order"]),
        # The form whose pattern fits best answers fewer of the checks alike than another form.
        ("build_tree", 707, ["tie-parent-before-depth", "ties-in-any-order"]),
        # What a rejected child leaves is drawn from the left and cut off at the last token.
        (
            "verify_sampled",
            7,
            ["biased-by-redrawing", "boundary-belongs-below", "rounding-falls-off-the-end"],
        ),
    ],
)
def test_bugs_of_an_example_answer_are_named_whatever_is_drawn(function, seed, bugs):
    """Where a part of them had no name, the draw decided which other bugs were like it."""
    files = with_function_of("confident", "dflash", function)
    found = found_in("dflash", files, seed)
    answers = [finding for finding in found if finding.dimension != "robustness"]
    assert sorted(finding.cause for finding in answers) == bugs
    assert all(finding.certainty == "confirmed" for finding in answers)


def test_errors_in_drawn_directions_accuse_no_other_bug(monkeypatch):
    """A gradient check draws its directions: one in which an error nearly vanishes made the answers
    unlike those of the bug, and like another bug's."""
    check, same = "check-moves-another-input", Answers.same

    def same_by_chance(self, form, asked):
        return self.patterns.forms.get(form) == check if asked == check else same(self, form, asked)

    monkeypatch.setattr(Answers, "same", same_by_chance)
    challenge, bug = load("layer_norm_backward"), "check-propagates-ones"
    files = challenge.forms[bug].plant(challenge.solution_files(), bug)
    with DiagnosisCertifier(challenge, corpus.SEED) as certifier:
        certifier.checks = sorted(challenge.fault_dictionary[bug])
        host = certifier.host(corpus.SEED)
        failures = list(certifier.failures(host, files, ()))
        (finding,) = Diagnoser(challenge, host, failures).diagnose().findings
    assert finding.cause == bug


def test_pattern_that_fits_all_leads_before_a_side_effect_that_is_confirmed():
    """Another order of ties also turns round one tie that has a trap of its own."""
    (answer,) = [
        answer
        for answer in corpus.buggy("dflash", "bugs3.toml")
        if answer.name == "deeper-first-on-ties"
    ]
    assert causes("dflash", answer.files) == ["tie-deeper-first"]


@pytest.mark.parametrize(
    ("challenge", "bug", "cause"),
    [
        # It raises in a second check, too, with the same message.
        ("fused_softmax_topk", "k-above-the-tile-refused", "k-above-a-tile"),
        # A trap that the cause explains was accused beside it, because both together answer alike.
        pytest.param(
            "kv_cache",
            "half-precision-scales",
            "scales-in-half-precision",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_a_cause_explains_accuses_no_other(challenge, bug, cause):
    (answer,) = [a for a in corpus.buggy(challenge, "bugs5.toml") if a.name == bug]
    assert causes(challenge, answer.files) == [cause]


@pytest.mark.parametrize("seed", [1, 2])
def test_column_that_wraps_round_is_named_behind_any_prefix(seed):
    """Behind an empty one it is the column that a wrapped row has; else it had no name."""
    files, challenge = with_function_of("hasty", "dflash", "tree_mask"), load("dflash")
    with DiagnosisCertifier(challenge, seed) as certifier:
        # A bad tree makes its loop endless.
        certifier.checks = ["random-masks", "mask-of-a-long-branch", "narrow-parents-wrap"]
        host = certifier.host(seed)
        failures = list(certifier.failures(host, files, ()))
        (finding,) = Diagnoser(challenge, host, failures).diagnose().findings
    assert (finding.cause, finding.certainty) == ("narrow-parents-wrap", "confirmed")


@pytest.mark.parametrize("seed", [1, 2])
def test_infinite_weights_of_empty_rows_have_every_nan_of_their_bug(seed):
    """Where a column of dout had one sign in all of them, dv was infinite there, and not NaN."""
    name, check = "flash_attention_backward", "empty-rows-nan"
    files = {"solution.py": (FIELD / "confident" / name / "solution.py").read_text()}
    challenge = load(name)
    with DiagnosisCertifier(challenge, seed) as certifier:
        certifier.checks = [check]
        host = certifier.host(seed)
        diagnoser = Diagnoser(challenge, host, list(certifier.failures(host, files, ())))
        assert diagnoser.answers.comparison(f"{check}#2", check).contains_mutant


def test_form_that_answers_more_alike_leads_another_whose_pattern_fits_better():
    """Which checks show a rounded scale is chance: the form for 8-bit codes alone, which fails few
    checks, was taken for it, and what it left open was a second finding."""
    bugs = corpus.buggy("kv_cache", "bugs5.toml")
    (bug,) = [bug for bug in bugs if bug.name == "half-precision-scales"]
    shown = ["floor-near-the-smallest-row", "scale-with-an-addend", "scales-in-half-precision"]
    by_chance = ["float32-in-float32-out", "keep-and-truncate", "small-rows-vanish"]
    challenge = load("kv_cache")
    with DiagnosisCertifier(challenge, corpus.SEED) as certifier:
        certifier.checks = [*shown, *by_chance]
        host = certifier.host(corpus.SEED)
        failures = list(certifier.failures(host, bug.files, ()))
        (finding,) = Diagnoser(challenge, host, failures).diagnose().findings
    assert finding.cause == "scales-in-half-precision"
    assert sorted(finding.explains) == sorted([*shown, *by_chance])


def test_one_place_that_raises_has_one_cause():
    """A list per tile that is too short also raises where it does not fill the answer."""
    files = {"solution.py": (FIELD / "confident" / NAME / "solution.py").read_text()}
    # It also copies rows that are not contiguous.
    named = ["logits-modified", "short-list-per-tile", "tile-grows-with-v"]
    assert sorted(causes(NAME, files)) == named


def test_narrow_bugs_beside_a_broad_one_are_named():
    """With this seed the search ended when none of the broad patterns was confirmed."""
    files = {"solution.py": (FIELD / "hasty" / NAME / "solution.py").read_text()}
    assert causes(NAME, files, seed=22) == [
        "unstable-sort",
        "matrix-materialised",
        "float16-numerators",
        "all-masked-row-passes",
        "values-unchecked",
        "dtypes-unchecked",
        "rank-ignored",
        "float16-sum",
    ]


@pytest.mark.parametrize(
    ("challenge", "form"),
    [
        # Its pattern never fits, because what state does to other checks is a matter of chance.
        ("flash_attention_forward", "mask-kept-between-calls#2"),
        # Its own trap fails at the first call, by what other checks left behind.
        ("dflash", "text-kept-between-calls"),
        # Its exception comes wherever sizes change, which is more than its own trap.
        ("flash_attention_forward", "mask-kept-between-calls#3"),
        # What piles up also comes from checks that passed.
        ("flash_attention_backward", "gradients-pile-up"),
        # Two forms of one bug answer its own trap alike; elsewhere only one answers as this does.
        ("dflash", "tree-kept-between-calls#2"),
        # An answer of an earlier check is overwritten, so its own trap ends sooner.
        ("flash_attention_backward", "answer-overwritten-later"),
        # It shows in most other checks, of which a bug of another kind explains some.
        ("kv_cache", "two-caches-share-state"),
        # It also asks once too often, which the dictionary's draw missed: another bug was accused.
        ("beam_search", "tokens-numbered-without-eos"),
        # Another bug fails the same checks; only the numbers in the messages differ.
        ("beam_search", "ended-prompts-still-asked"),
    ],
)
def test_mutant_leads_with_its_own_name(challenge, form):
    (trap,) = [trap for trap in load(challenge).traps if form in trap.forms]
    files = trap.plant(load(challenge).solution_files(), form)
    assert causes(challenge, files) == [trap.id]


@pytest.mark.parametrize(
    ("control_passes", "cause"), [(True, "merge-forgets-the-sum"), (False, "unnamed")]
)
def test_only_failure_is_likely_when_its_situation_without_the_trigger_passes(
    control_passes, cause
):
    """Another bug's wrong answer to one trap: its own mutant answers otherwise and fails more."""
    challenge = load("flash_attention_forward")
    (other,) = [trap for trap in challenge.traps if trap.id == "output-not-rescaled"]
    with DiagnosisCertifier(challenge, corpus.SEED) as certifier:
        host = certifier.host(corpus.SEED)
        failures = certifier.failures(host, other.plant(challenge.solution_files()), ())
        only = [failure for failure in failures if failure.id == "merge-forgets-the-sum"]
        found = Diagnoser(challenge, host, only, lambda trap: control_passes).diagnose().findings
    assert [(finding.cause, finding.certainty) for finding in found] == [(cause, "likely")]


@pytest.mark.parametrize(
    ("fails_alone", "cause"), [(True, "merge-forgets-the-sum"), (False, "unnamed")]
)
def test_trap_that_fails_after_other_checks_only_is_not_accused(fails_alone, cause):
    """What earlier calls left behind makes it fail, so that its bug is not there."""
    challenge = load("flash_attention_forward")
    (other,) = [trap for trap in challenge.traps if trap.id == "output-not-rescaled"]
    with DiagnosisCertifier(challenge, corpus.SEED) as certifier:
        host = certifier.host(corpus.SEED)
        failures = certifier.failures(host, other.plant(challenge.solution_files()), ())
        only = [failure for failure in failures if failure.id == "merge-forgets-the-sum"]
        asked = (lambda trap: True), (lambda trap: fails_alone)
        found = Diagnoser(challenge, host, only, *asked).diagnose().findings
    assert [(finding.cause, finding.certainty) for finding in found] == [(cause, "likely")]


def test_weights_that_an_earlier_call_left_behind_are_not_small_weights_dropped():
    """Its wrong elements are zeros in both; without the forward calls before it the trap passes."""
    (answer,) = [
        answer
        for answer in corpus.buggy("flash_attention_backward", "bugs13.toml")
        if answer.name == "saved-results-of-the-last-forward"
    ]
    challenge = load("flash_attention_backward")
    with DiagnosisCertifier(challenge, corpus.SEED) as certifier:
        host = certifier.host(corpus.SEED)
        failures = list(certifier.failures(host, answer.files, ()))
        # As if no trap knew the bug.
        unknown = [failure for failure in failures if failure.id != "needs-its-own-forward"]
        asked = (lambda trap: True), (lambda trap: trap.id != "small-weights-dropped")
        found = Diagnoser(challenge, host, unknown, *asked).diagnose().findings
    assert "small-weights-dropped" in {failure.id for failure in failures}
    assert [finding.cause for finding in found] == ["unnamed"]


def test_only_failure_for_another_reason_than_the_traps_is_not_its_bug():
    """What is wrong is another argument than the one that the trap's bug changes."""
    (answer,) = [
        answer
        for answer in corpus.buggy("flash_attention_backward", "bugs6.toml")
        if answer.name == "blind-rows-of-dout-zeroed"
    ]
    challenge = load("flash_attention_backward")
    with DiagnosisCertifier(challenge, corpus.SEED) as certifier:
        host = certifier.host(corpus.SEED)
        own, *_ = certifier.failures(host, answer.files, ())
        other = [replace(own, id="lse-overwritten")]
        found = Diagnoser(challenge, host, other).diagnose().findings
    assert "dout" in own.message
    assert [finding.cause for finding in found] == ["unnamed"]


def test_slow_check_that_fails_for_another_reason_than_its_bug_is_not_its_bug(monkeypatch):
    """Gradients of the wrong dtype end the measurement of memory before it says anything."""
    challenge = load("flash_attention_backward")
    names = "score-matrix-in-memory", "gradients-in-double"
    diagnoser = Diagnoser(challenge, None, [Failure(name, "", Transcript()) for name in names])
    monkeypatch.setattr(diagnoser, "_is_wrong_alike", lambda trap: False)
    assert [diagnoser._may_be(diagnoser.traps[name]) for name in names] == [False, True]


def test_order_does_not_depend_on_how_many_checks_a_draw_fails():
    """The one that explains most leads; a check more or less changes nothing."""
    orders = set()
    for explained in ((12, 3, 4), (12, 4, 3), (14, 3, 5)):
        names = "tie-higher-token-wins", "one-call-a-prompt", "eos-takes-a-slot"
        causes = {
            name: {f"check {n}" for n in range(count)}
            for name, count in zip(names, explained, strict=True)
        }
        report = Report(Patterns(load("beam_search"), (), ()), {}, causes, set(names))
        orders.add(tuple(report.ordered()))
    assert orders == {("tie-higher-token-wins", "eos-takes-a-slot", "one-call-a-prompt")}


def test_of_two_bugs_that_fit_alike_the_one_that_explains_the_others_trap_leads():
    """Which one led was decided by the last digits of what both answer to bad input."""
    diagnoser = Diagnoser(load("layer_norm_backward"), None, [])
    both = "length-one-accepted", "parameter-shapes-unchecked"
    assert [diagnoser._rivals_that_show(form, both) for form in both] == [1, 0]


def test_forms_of_one_bug_take_no_other_bugs_place_among_the_candidates():
    """Five forms of one mask left a bug of another kind without a comparison."""
    challenge = load("flash_attention_forward")
    several = [trap.id for trap in challenge.traps if len(trap.forms) > 1]
    failures = [Failure(trap, "", Transcript()) for trap in several]
    diagnoser = Diagnoser(challenge, None, failures)
    best = diagnoser._best_by_fit()
    traps = {diagnoser.forms[form] for form in best}
    assert MOST_CANDIDATES <= len(traps) < len(best)
    assert sorted(best) == sorted(f for f, trap in diagnoser.forms.items() if trap in traps)


def test_bugs_that_fail_nearly_the_same_checks_share_a_place_among_the_candidates():
    """A dozen bugs of what is returned fail every check, and left a narrower one no place."""
    challenge = load("beam_search")
    diagnoser = Diagnoser(
        challenge, None, [Failure(t.id, "", Transcript()) for t in challenge.traps]
    )
    best = {diagnoser.forms[form] for form in diagnoser._best_by_fit()}
    everything = [t for t in best if len(diagnoser.patterns.fails(t)) > 150]
    assert len(everything) > 5
    assert len(best) - len(everything) >= MOST_CANDIDATES - 2


@pytest.mark.parametrize(
    ("refusals", "left", "is_echo"), [(0, 2, True), (0, 3, False), (9, 3, False)]
)
def test_many_accepted_bad_inputs_do_not_make_wrong_answers_an_echo(refusals, left, is_echo):
    challenge = load("dflash")
    answers = [trap.id for trap in challenge.traps if trap.dimension == "traps"][:8]
    bad = [trap.id for trap in challenge.traps if trap.dimension == "robustness"][:refusals]
    failures = [Failure(name, "", Transcript()) for name in [*answers, *bad]]
    diagnoser = Diagnoser(challenge, None, failures)
    diagnoser.rest = set(answers[:left])
    assert diagnoser._is_echo() is is_echo


@pytest.mark.full
@pytest.mark.parametrize(
    ("entrant", "challenge", "seeds"),
    [
        ("hasty", "beam_search", (101, 404)),
        # Two bugs that fit alike.
        ("hasty", "layer_norm_backward", (101, 202)),
        # Rounding turned round two probabilities of a check that is about memory.
        ("hasty", "fused_softmax_topk", (101, 202)),
        # What no bug explains was a little more or less than a quarter of the failures.
        ("confident", "dflash", (101, 303)),
    ],
)
def test_findings_are_the_same_with_every_seed(entrant, challenge, seeds):
    files = {"solution.py": (FIELD / entrant / challenge / "solution.py").read_text()}
    first, second = (causes(challenge, files, seed) for seed in seeds)
    # Which of two bugs that show in the same checks leads is a matter of the draw.
    assert sorted(first) == sorted(second)
    assert "too-few-rows-accepted" not in first


def test_bug_that_another_one_covers_is_not_accused():
    """A search that stops when W hypotheses have ended looks at no live beam."""
    files = {"solution.py": (FIELD / "hasty" / "beam_search" / "solution.py").read_text()}
    found = causes("beam_search", files)
    assert "full-pool-stops" in found
    assert "bound-from-the-weakest-beam" not in found


@pytest.mark.parametrize(
    ("condition", "cause"), [("not k.shape[2]", "no-keys"), ("not q.size or not k.size", "unnamed")]
)
def test_crash_in_exactly_the_situations_of_a_bug_that_raises_is_likely_that_bug(condition, cause):
    """Its mutants raise other exceptions; who raises in further situations has another bug."""
    files = load("flash_attention_backward").solution_files()
    checked = "    _check(q, k, v, tile)\n"
    raising = f"{checked}    if {condition}:\n        [][0]\n"
    files = {**files, "solution.py": files["solution.py"].replace(checked, raising)}
    assert causes("flash_attention_backward", files) == [cause]


@pytest.mark.parametrize(
    ("challenge", "old", "new", "cause"),
    [
        # The only check that fails.
        ("dflash", "max(rows) >=", "nodes and max(rows) >=", "short-cache-accepted"),
        # A case of the contract fails at the same place.
        ("flash_attention_forward", "q.ndim != 4 or k.ndim != 4", "False", "three-axes-accepted"),
    ],
)
def test_missing_check_that_ends_in_another_exception_is_named(challenge, old, new, cause):
    """It was unnamed: its mutant answers the bad input. It costs little, since nothing is answered,
    and says what is seen."""
    files = load(challenge).solution_files()
    assert files["solution.py"].count(old) == 1
    files = {**files, "solution.py": files["solution.py"].replace(old, new)}
    answer = corpus.Answer(challenge, cause, files)
    ((_, (finding,)),) = corpus.diagnose([answer])
    assert (finding.cause, finding.certainty, finding.severity) == (cause, "likely", "minor")
    assert "(here: raised " in finding.sentence


@pytest.mark.parametrize("key", ["k.shape[2]", "q.shape[2]"])
def test_trap_that_fails_by_what_was_kept_accuses_no_other_bug(key):
    """A wrong mask of an earlier call gives the answers of bugs that keep nothing: alone, or as a
    pair, they explain more checks than the bug's own mutant, which keeps it under another key."""
    challenge = load("flash_attention_backward")
    (trap,) = [trap for trap in challenge.traps if trap.id == "kept-without-causal"]
    files = trap.plant(challenge.solution_files())
    own = "_CAUSAL.setdefault((q.shape[2], k.shape[2], tile), causal)"
    assert own in files["solution.py"]
    files["solution.py"] = files["solution.py"].replace(own, f"_CAUSAL.setdefault({key}, causal)")
    answer = corpus.Answer(challenge.id, key, files)
    ((_, findings),) = corpus.diagnose([answer])
    assert [finding.cause for finding in findings] == [trap.id]
