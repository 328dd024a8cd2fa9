"""The certificate of the diagnosis fails when any of its goals is missed."""

import pytest
from typer.testing import CliRunner

from trapline.arena.certify.diagnosis import Diagnosed, DiagnosisCertificate, DiagnosisCertifier
from trapline.arena.certify.diagnosis_matrix import diagnosis_matrix
from trapline.arena.challenge import load
from trapline.arena.record import Finding
from trapline.cli import certify as cli
from trapline.cli.main import build


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


def test_what_an_earlier_check_left_behind_accuses_no_other_bug():
    """As in a grade: its mask of an earlier call leaves the trap of another bug unmasked."""
    challenge, form = load("flash_attention_forward"), "mask-kept-between-calls#4"
    own = challenge.forms[form]
    with DiagnosisCertifier(challenge, 1) as certifier:
        subject = "mutants", form, [own.id], own.plant(certifier.gold, form)
        (found,) = certifier.certify([subject]).mutants
    assert found.is_exact


def test_findings_beyond_its_own_are_counted_even_without_a_name():
    likely = Diagnosed(subject="l", carries=["a"], findings=[finding("a", certainty="likely")])
    mutants = [diagnosed(["a"], "a"), diagnosed(["a"], "a", "unnamed", "unnamed"), likely]
    found = certificate(mutants=[*mutants, diagnosed(["a"], "a", "b")]).summary()
    assert found["exactly_their_own_finding"] == 0.25
    assert found["unnamed_findings_a_mutant"] == 0.5
    assert found["own_finding_confirmed"] == 0.75


def test_matrix_lists_each_mutant_whose_findings_are_not_exactly_its_own():
    extra = Diagnosed(subject="extra", carries=["a"], findings=[finding("a"), finding("unnamed")])
    lost = Diagnosed(subject="a + b", carries=["a", "b"], findings=[])
    given = [certificate(mutants=[diagnosed(["a"], "a"), extra], pairs=[lost]), certificate()]
    lines = diagnosis_matrix(given).splitlines()
    (heading,) = [line for line in lines if line.startswith("| challenge")]
    rows = [line for line in lines if line.startswith("| x |")]
    assert {row.count("|") for row in rows} == {heading.count("|")}
    assert rows[0] == "| x | 1 | 2 | 1 | 1 | 0.5 | 0 | 1 | 0 | 0 | 20 | 1 | 1 |"
    assert "| extra | a (confirmed), unnamed (confirmed) |" in lines
    assert "| a + b | no finding |" in lines
    assert lines[-1] == "All findings are exactly those of the bugs."


def test_matrix_is_written(tmp_path, sorting, monkeypatch):
    monkeypatch.setattr(cli, "_chosen", lambda *_: [sorting])
    monkeypatch.setattr(DiagnosisCertifier, "certify", lambda *_: certificate())
    args = ["certify", "--diagnosis", "--pairs", "0", "--write", str(tmp_path / "matrix.md")]
    assert CliRunner().invoke(build("certify"), args).exit_code == 0
    assert (tmp_path / "matrix.md").read_text() == diagnosis_matrix([certificate()])
