"""Every challenge that ships is certified: right answers pass, each trap catches its bug."""

import pytest

from trapline.arena.certify.certify import Certifier, kill_rate
from trapline.arena.certify.mechanical import mechanical_mutants
from trapline.arena.challenge import load, load_all
from trapline.arena.runs.run import choose_level

SEED = 20261117


@pytest.mark.parametrize("name", load_all())
def test_right_answers_pass_and_mutants_and_controls_fail(name):
    # One seed, so that the suite says the same twice; `trapline certify` draws one.
    certificate = Certifier(load(name), choose_level(), seed=SEED).certify()
    assert [f"{f.kind} {f.subject}: {f.problem} {f.message}" for f in certificate.problems()] == []
    assert len(certificate.of("right")) >= 3
    assert len(certificate.of("named")) >= 10
    assert len(certificate.of("control")) == 4


def test_eight_challenges_with_more_than_a_hundred_traps():
    assert len(load_all()) == 8
    assert sum(len(challenge.traps) for challenge in load_all().values()) >= 100


@pytest.mark.full
@pytest.mark.parametrize("name", load_all())
def test_mechanical_mutants_are_caught(name):
    certificate = Certifier(load(name), choose_level()).certify(mechanical=True)
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
