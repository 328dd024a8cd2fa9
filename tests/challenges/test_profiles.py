"""Profiles: what their prompts ask for is judged, what they do not ask for is not."""

from dataclasses import replace

import pytest

from trapline.arena.certify.certify import Certifier
from trapline.arena.challenge import load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.judge.checks import first_failure, run_check
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.local import LocalSubmission
from trapline.arena.profile import FLAWED, profile_names
from trapline.arena.runs.field import find_entries
from trapline.arena.runs.run import choose_level
from trapline.arena.standings.profiles import of_one_profile

SEED = 11
#: Those with a contract of their own: a flawed prompt has its challenge's, which other tests cover.
PROFILES = [
    (challenge.id, name)
    for challenge in load_all().values()
    for name in profile_names(challenge.folder)
    if load(challenge.id, profile=name).flaw is None
]
RUN = [
    (challenge, name) for challenge, name in PROFILES if not load(challenge, profile=name).not_run
]
SCOPED = [
    (challenge, name)
    for challenge, name in RUN
    if not load(challenge, profile=name).profile.has_rule
]
NAME = "layer_norm_backward"


def slow_checks(judge):
    return getattr(judge.module("cases"), "SLOW", frozenset())


@pytest.mark.parametrize(("challenge", "profile"), RUN)
def test_the_control_answer_passes_every_check(challenge, profile):
    judge = load(challenge, profile=profile)
    config = judge.sandbox_config("process")
    if (judge.control / "adapter.py").is_file():
        config = replace(config, entry="adapter")
    answer = LocalSubmission(judge.control, config)
    checks = [c for c in (*judge.cases, *judge.traps) if c.id not in slow_checks(judge)]
    assert first_failure(checks, answer, SEED) is None


def survives(judge, trap, folder):
    """Whether this trap lets its own bug pass."""
    for name, text in trap.plant(judge.solution_files()).items():
        (folder / name).write_text(text)
    config = judge.sandbox_config("process", judge.plan.limits.mutant_seconds)
    return run_check(trap, LocalSubmission(folder, config), SEED).state == "pass"


@pytest.mark.parametrize(("challenge", "profile"), RUN)
def test_every_trap_in_scope_catches_its_bug(challenge, profile, tmp_path):
    judge = load(challenge, profile=profile)
    asked = [trap for trap in judge.traps if trap.id not in slow_checks(judge)]
    assert [trap.id for trap in asked if survives(judge, trap, tmp_path)] == []


def passes_on_a_seed(judge, trap, folder):
    """Whether the contract lets this bug pass on one of a few seeds."""
    for name, text in trap.plant(judge.solution_files()).items():
        (folder / name).write_text(text)
    answer = LocalSubmission(folder, judge.sandbox_config("process"))
    return any(first_failure(judge.cases, answer, seed) is None for seed in range(5))


@pytest.mark.parametrize(
    "challenge", [name for name, profile in RUN if (name, profile) not in SCOPED]
)
def test_verdict_on_a_named_bug_is_the_same_on_each_seed(challenge, tmp_path):
    judge = load(challenge, profile="published")
    assert [trap.id for trap in judge.traps if passes_on_a_seed(judge, trap, tmp_path)] == []


@pytest.mark.parametrize(("challenge", "profile"), RUN)
def test_the_fault_dictionary_knows_every_trap(challenge, profile):
    judge = load(challenge, profile=profile)
    assert set(judge.fault_dictionary) == {form for trap in judge.traps for form in trap.forms}


@pytest.mark.full
@pytest.mark.parametrize(("challenge", "profile"), RUN)
def test_profiles_are_certified_and_their_controls_score_100(challenge, profile):
    certificate = Certifier(load(challenge, profile=profile), choose_level()).certify()
    assert [f"{f.kind} {f.subject}: {f.problem} {f.message}" for f in certificate.problems()] == []


FLAWS = [name for name, one in load_all().items() if FLAWED in profile_names(one.folder)]


@pytest.mark.full
@pytest.mark.parametrize("challenge", FLAWS)
def test_flawed_prompts_are_certified(challenge):
    certificate = Certifier(load(challenge, profile=FLAWED), choose_level()).certify()
    assert [f"{f.kind} {f.subject}: {f.problem} {f.message}" for f in certificate.problems()] == []
    outcomes = {f.message for f in certificate.of("flaw")}
    assert outcomes == {"noticed", "followed", "neither"}


def test_certificate_of_a_flaw_names_an_unexpected_outcome(monkeypatch):
    judge = load(NAME, profile=FLAWED)
    flaw = judge.flaw.model_copy(update={"another": judge.flaw.mutant})
    changed = judge.profile.plan.model_copy(update={"flaw": flaw})
    monkeypatch.setattr(judge.profile, "plan", changed)
    *_, last = Certifier(judge, "process", SEED).subjects(mechanical=False)
    assert last().problem == "followed instead of neither"


@pytest.mark.parametrize(("challenge", "profile"), SCOPED)
def test_capabilities_name_checks_that_exist(challenge, profile):
    judge = load(challenge, profile=profile)
    own = load(challenge)
    known = {check.id for check in (*own.cases, *own.traps)}
    assert {check for checks in judge.capabilities.values() for check in checks} <= known
    assert set(judge.profile.plan.scope) <= {*judge.capabilities, "refusals"}


@pytest.mark.parametrize(("challenge", "profile"), PROFILES)
def test_weights_sum_to_one(challenge, profile):
    assert sum(load(challenge, profile=profile).plan.weights.values()) == pytest.approx(1.0)


def graded(folder):
    request = GradeRequest("somebody", NAME, 1, folder, profile="published", seed=SEED)
    return grade(request, load(NAME, profile="published")).cell


@pytest.fixture(scope="module")
def control():
    """The cell of the control answer."""
    return graded(load(NAME, profile="published").control)


def test_checks_outside_the_scope_are_not_asked_and_weigh_nothing(control):
    judge, cell = load(NAME, profile="published"), control
    assert (cell.state, cell.score, cell.profile) == ("pass", 100.0, "published")
    states = {check.id: check.state for check in (*cell.cases, *cell.traps)}
    assert set(states) == {c.id for c in (*load(NAME).cases, *load(NAME).traps)}
    assert {check for check, state in states.items() if state == "not_asked"} == set(
        judge.not_asked
    )
    assert states["bloated-cache"] == states["bad-input-is-refused"] == "not_asked"
    assert cell.dimensions["robustness"].score is None


def adapted(tmp_path, source, adapter=None):
    control = load(NAME, profile="published").control
    (tmp_path / "adapter.py").write_text(adapter or (control / "adapter.py").read_text())
    (tmp_path / "layernorm.py").write_text(source)
    return tmp_path


@pytest.mark.full
def test_a_bug_within_the_scope_is_found_by_name(tmp_path):
    control = load(NAME, profile="published").control
    source = (control / "layernorm.py").read_text()
    wrong = source.replace("g - g.mean(axis=-1, keepdims=True)", "g")
    assert wrong != source
    cell = graded(adapted(tmp_path, wrong))
    assert cell.state == "fail"
    assert cell.findings[0].certainty == "confirmed"


def test_an_adapter_that_imports_the_judge_fails_with_a_sentence(tmp_path):
    cell = graded(adapted(tmp_path, "", "from trapline.gold.norms import oracle\n"))
    assert cell.state == "fail"
    assert cell.reason.startswith("cannot be imported: raised ModuleNotFoundError")


def test_an_answer_without_adapter_or_solution_says_so(tmp_path):
    (tmp_path / "notes.md").write_text("nothing")
    assert graded(tmp_path).reason == "there is no adapter.py or solution.py"


def test_an_unknown_profile_is_one_sentence():
    with pytest.raises(UsageError, match="its profiles are: flawed, published"):
        load(NAME, profile="publised")


def field_of(tmp_path, settings):
    for entrant in ("one", "two"):
        folder = tmp_path / entrant / NAME
        folder.mkdir(parents=True)
        (folder / "adapter.py").write_text("")
    (tmp_path / "field.toml").write_text(settings)
    return tmp_path


def test_a_field_says_its_profile(tmp_path):
    field = field_of(tmp_path, 'profile = "published"\ngold = true\n')
    entries = {entry.entrant: entry for entry in find_entries(field, [])}
    assert {entry.profile for entry in entries.values()} == {"published"}
    assert entries["gold"].folder == load(NAME, profile="published").control


def test_an_entrant_with_an_unknown_profile_leaves_the_rest_of_the_field(tmp_path):
    settings = 'profile = "published"\n[profiles]\ntwo = "unheard"\n'
    one, two = find_entries(field_of(tmp_path, settings), [])
    assert (one.profile, one.trouble) == ("published", "")
    assert two.trouble.startswith(f"{NAME} has no profile 'unheard'")


def test_scores_of_several_profiles_are_not_mixed(control):
    cell = control
    own = cell.model_copy(update={"profile": "", "entrant": "other"})
    assert of_one_profile([cell]) == [cell]
    with pytest.raises(UsageError, match="choose one with --profile"):
        of_one_profile([cell, own])
    assert of_one_profile([cell, own], "published") == [cell]
    assert of_one_profile([cell, own], "own") == [own]
    with pytest.raises(UsageError, match="no scores of profile 'x'"):
        of_one_profile([cell, own], "x")
