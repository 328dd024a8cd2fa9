"""The certificate of the diagnosis fails when any of its goals is missed."""

import pytest

from trapline.arena.certify.diagnosis import Diagnosed, DiagnosisCertificate, DiagnosisCertifier
from trapline.arena.record import Finding


def finding(cause, certainty="confirmed", severity="major"):
    return Finding(
        cause=cause, certainty=certainty, severity=severity, sentence="It is wrong.", explains=[]
    )


def diagnosed(carries, *causes):
    return Diagnosed(subject="one", carries=carries, findings=[finding(cause) for cause in causes])


def certificate(**kinds):
    held = {
        "mutants": [diagnosed(["a"], "a")] * 100,
        "pairs": [diagnosed(["a", "b"], "b", "a")] * 20,
        "right": [diagnosed([])],
        "mechanical": [diagnosed([], "unnamed")] * 20,
    }
    return DiagnosisCertificate(challenge="x", seed=1, **(held | kinds))


def test_certificate_holds_when_every_goal_is_met():
    assert certificate().holds()
    assert certificate(pairs=[], mechanical=[]).holds()


@pytest.mark.parametrize(
    "missed",
    [
        {"mutants": [diagnosed(["a"], "a")] * 96 + [diagnosed(["a"], "unnamed", "a")] * 4},
        {"mutants": [diagnosed(["a"], "a")] * 8 + [diagnosed(["a"], "a", "b")]},
        {
            "mutants": [
                Diagnosed(
                    subject="a",
                    carries=["a"],
                    findings=[finding("a"), finding("b", severity="critical")],
                )
            ]
            + [diagnosed(["a"], "a")] * 99
        },
        {"right": [diagnosed([], "unnamed")]},
        {"pairs": [diagnosed(["a", "b"], "a", "b")] * 3 + [diagnosed(["a", "b"], "a")]},
        {"pairs": [diagnosed(["a", "b"], "a", "b")] * 18 + [diagnosed(["a", "b"], "a", "b", "c")]},
        {"mechanical": [diagnosed([], "unnamed", "a")] * 3},
        {"mechanical": [diagnosed([], "a")] * 18 + [diagnosed([], "a", "b", "c", "d")]},
    ],
    ids=["leads", "accuses", "critical", "alarm", "pairs", "third", "median", "more-than-three"],
)
def test_certificate_does_not_hold_when_one_goal_is_missed(missed):
    assert not certificate(**missed).holds()


def test_subjects_are_right_answers_bugs_pairs_and_mechanical_mutants(sorting):
    with DiagnosisCertifier(sorting, 3) as certifier:
        kinds = [kind for kind, *_ in certifier.subjects(2, 3)]
        forms = sum(len(trap.forms) for trap in sorting.traps)
        assert [kinds.count(k) for k in ("right", "mutants", "pairs", "mechanical")] == [
            3, forms, 2, 3
        ]  # fmt: skip
        found = certifier.certify(list(certifier.subjects(0))).summary()
    assert found["right_answers_with_findings"] == 0
    assert found["mutants"] == forms
