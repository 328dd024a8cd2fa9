"""Bugs of authors who never saw the traps are caught and named; right answers raise no alarm."""

from functools import cache

import corpus
import pytest

from trapline.arena.challenge import load

#: A cheap part of the corpus for every run; `full` runs all of it.
SAMPLE = 1
#: Of all bugs: caught, named, and led with.
GOALS = 0.97, 0.90, 0.85


@pytest.fixture(autouse=True)
def _no_stray_modules(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("challenge", corpus.challenges())
def test_sample_of_the_corpus(challenge):
    bugs = corpus.buggy(challenge)
    step = max(1, len(bugs) // SAMPLE)
    results = list(corpus.diagnose([*corpus.right(challenge)[:1], *bugs[::step]]))
    right, *wrong = results
    assert right[1] == [], right[0].name
    missed = [answer.name for answer, findings in wrong if not findings]
    assert not missed


@pytest.mark.parametrize("challenge", corpus.challenges())
def test_a_trap_that_alone_names_a_bug_of_the_corpus_was_seen(challenge):
    files = [path.name for path in sorted(corpus.ROOT.joinpath(challenge).glob("bugs*.toml"))]
    bugs = [bug for file in files for bug in corpus.buggy(challenge, file)]
    alone = {bug.named_by[0] for bug in bugs if len(bug.named_by) == 1}
    assert alone <= {trap.id for trap in load(challenge).traps if trap.seen}


@pytest.mark.full
@pytest.mark.parametrize("challenge", corpus.challenges())
def test_right_answers_raise_no_alarm(challenge):
    answers = corpus.right(challenge)
    assert len(answers) >= 5
    alarms = {a.name: found for a, found in corpus.diagnose(answers) if found}
    assert not alarms


def rounds():
    """Challenge and file: the first round of bugs, and the second, written after its repairs."""
    files = sorted(corpus.ROOT.glob("*/bugs*.toml"))
    return [(path.parent.name, path.name) for path in files]


@pytest.mark.full
@pytest.mark.parametrize(("challenge", "file"), rounds())
def test_bugs_of_one_round_are_caught_named_and_led_with(challenge, file):
    """One bug of slack, since a round has few."""
    count, *reached = counts(challenge, file)
    assert count >= {"bugs.toml": 25, "bugs6.toml": 5}.get(file, 6)
    assert all(found >= goal * count - 1 for found, goal in zip(reached, GOALS, strict=True))


@pytest.mark.full
def test_bugs_of_the_whole_corpus_are_caught_named_and_led_with():
    """The same goals over all bugs, without slack."""
    count, *reached = map(sum, zip(*(counts(*each) for each in rounds()), strict=True))
    print("{} caught, {} named, {} led with".format(*reached), "of", count)
    assert all(found >= goal * count for found, goal in zip(reached, GOALS, strict=True))


@cache
def counts(challenge, file):
    """How many bugs a round has; how many of them are caught, named, and led with."""
    answers = corpus.buggy(challenge, file)
    caught, named, led = 0, 0, 0
    for answer, findings in corpus.diagnose(answers):
        causes = [finding.cause for finding in findings]
        caught += bool(findings)
        named += bool(set(causes) & set(answer.named_by))
        led += bool(causes) and causes[0] in answer.named_by
        print(f"{challenge} {file} {answer.name}: {causes}")
    return len(answers), caught, named, led
