"""Every challenge that ships is certified: right answers pass, each trap catches its bug."""

from collections import Counter

import pytest

from trapline.arena.certify.certify import Certifier, kill_rate
from trapline.arena.certify.mechanical import mechanical_mutants
from trapline.arena.challenge import load, load_all
from trapline.arena.judge import grade, measure
from trapline.arena.judge.mutants import MutantHost
from trapline.arena.process.sandbox import probe
from trapline.arena.runs.run import choose_level

SEED = 20261117


#: The quick suite starts one sandbox for every so many named mutants.
STEP = 60


def quick(checks, challenge):
    return [check for check in checks if check.id not in challenge.slow]


def problems(outcomes):
    return [f"{o.kind} {o.subject}: {o.problem} {o.message}" for o in outcomes if o.problem]


@pytest.mark.parametrize("name", load_all())
def test_right_answers_pass_and_controls_fail(name, monkeypatch):
    """In the sandbox: all right answers, all controls and a sample of the named mutants.

    The gold solution is graded as a whole, which asks it every check, those that train for seconds
    too; it need not be asked again.
    """
    # Beside other tests no timing settles: a few rounds are enough to see that speed counts.
    monkeypatch.setattr(measure, "MOST_ROUNDS", 1)
    monkeypatch.setattr(measure, "QUICK_ROUNDS", 3)
    # Its own tests must notice one of these mutants; a run of a suite takes a second.
    monkeypatch.setattr(grade, "QUICK_MUTANTS", 2)
    # One seed, so that the suite says the same twice; `trapline certify` draws one.
    challenge = load(name)
    certifier = Certifier(challenge, choose_level(), seed=SEED)
    certifier.checks = quick(certifier.checks, challenge)
    _gold, *subjects = certifier.subjects(mechanical=False)
    named = sum(len(trap.forms) for trap in challenge.traps)
    outcomes = [subject() for subject in (*subjects[:-named], *subjects[-named::STEP])]
    assert problems(outcomes) == []
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert kinds["right"] >= 2
    assert kinds["control"] == 4
    assert kinds["named"] >= len(challenge.traps) // STEP
    assert kinds["dimensions"] == 1


@pytest.mark.parametrize("name", load_all())
def test_every_named_mutant_fails_its_own_trap(name):
    """In one process without a sandbox; `full` asks the slow traps, in a sandbox for each."""
    challenge = load(name)
    forms = {form: trap.id for trap in quick(challenge.traps, challenge) for form in trap.forms}
    with MutantHost(challenge, SEED) as host:
        survivors = [form for form, trap in forms.items() if not host.run(form, trap).failed]
    assert survivors == []
    assert len(forms) >= 10


@pytest.mark.full
@pytest.mark.parametrize("name", load_all())
def test_whole_certificate_has_no_problem(name):
    certificate = Certifier(load(name), choose_level(), seed=SEED).certify()
    assert problems(certificate.findings) == []
    assert len(certificate.of("named")) >= 10


def test_eight_challenges_with_more_than_a_hundred_traps():
    assert len(load_all()) == 8
    assert sum(len(challenge.traps) for challenge in load_all().values()) >= 100


@pytest.mark.full
@pytest.mark.parametrize("name", load_all())
def test_mechanical_mutants_are_caught(name):
    """With a seed that is drawn, and at every isolation level of the machine."""
    certificate = Certifier(load(name), choose_level(), levels=probe()).certify(mechanical=True)
    assert problems(certificate.findings) == [], certificate.seed
    survivors = [f.subject for f in certificate.of("mechanical") if not f.fell_to]
    assert kill_rate(certificate) >= 0.9, survivors


@pytest.mark.parametrize("name", load_all())
def test_challenge_has_all_its_parts(name):
    challenge = load(name)
    assert challenge.id == challenge.folder.name
    assert sum(challenge.plan.weights.values()) == pytest.approx(1.0)
    assert len({trap.id for trap in challenge.traps}) == len(challenge.traps)
    for trap in challenge.traps:
        assert trap.story
        assert trap.catches
    for path in (
        "prompt.md",
        "starter/solution.py",
        "solution/solution.py",
        "solution/ANALYSIS.md",
    ):
        assert (challenge.folder / path).is_file(), path
    assert list((challenge.folder / "solution").glob("test_*.py"))


@pytest.mark.parametrize("name", load_all())
def test_prompt_does_not_name_its_traps(name):
    challenge = load(name)
    for trap in challenge.traps:
        assert trap.id not in challenge.prompt
        assert trap.catches.lower() not in challenge.prompt.lower()


@pytest.mark.parametrize("name", load_all())
def test_excused_mechanical_mutants_exist_and_have_reasons(name):
    """Each by its own id, which exists, with a reason; at most a tenth are known to survive."""
    challenge = load(name)
    known = {mutant.id for mutant in mechanical_mutants(challenge.solution_files())}
    equivalent, survivors = challenge.equivalent, challenge.survivors
    assert equivalent.keys() <= known
    assert survivors.keys() <= known - equivalent.keys()
    assert all([*equivalent.values(), *survivors.values()])
    assert len(survivors) <= 0.1 * (len(known) - len(equivalent))
