"""The certificates of the diagnosis as Markdown: which findings each mutant has."""

from collections.abc import Sequence

from trapline.arena.certify.diagnosis import Diagnosed, DiagnosisCertificate

#: Heading → the figure of a certificate's summary.
_COLUMNS = {
    "mutants": "mutants",
    "led": "lead_with_their_own_finding",
    "confirmed": "own_finding_confirmed",
    "exactly their own": "exactly_their_own_finding",
    "accusations of others a mutant": "accusations_of_others_a_mutant",
    "pairs": "pairs",
    "both named": "pairs_with_both_named",
    "a third accused": "pairs_with_a_third_accused",
    "mechanical caught": "mechanical_mutants_caught",
    "median of findings": "median_of_their_findings",
    "at most three": "share_with_at_most_three_findings",
}


def diagnosis_matrix(certificates: Sequence[DiagnosisCertificate]) -> str:
    """A table of all challenges, then every mutant whose findings are not exactly its own."""
    lines = [
        "# Findings of the mutants",
        "",
        "Written by `trapline certify --diagnosis --write FILE`; do not edit.",
        "A mutant is the gold solution with one named bug, or with two; its findings should be",
        "these and no others. Mechanical mutants carry no named bug.",
        "",
        f"| challenge | seed | {' | '.join(_COLUMNS)} |",
        "|---" * (len(_COLUMNS) + 2) + "|",
    ]
    lines += [_row(certificate) for certificate in certificates]
    for certificate in certificates:
        lines += ["", *_section(certificate)]
    return "\n".join(lines) + "\n"


def _row(certificate: DiagnosisCertificate) -> str:
    summary = certificate.summary()
    figures = " | ".join(f"{summary[name]:g}" for name in _COLUMNS.values())
    return f"| {certificate.challenge} | {certificate.seed} | {figures} |"


def _section(certificate: DiagnosisCertificate) -> list[str]:
    subjects = [*certificate.mutants, *certificate.pairs, *certificate.right]
    others = [subject for subject in subjects if not subject.is_exact]
    lines = [f"## {certificate.challenge}", ""]
    if not others:
        return [*lines, "All findings are exactly those of the bugs."]
    return [
        *lines,
        "| mutant | findings |",
        "|---|---|",
        *(f"| {subject.subject} | {found_in_words(subject)} |" for subject in others),
    ]


def found_in_words(subject: Diagnosed) -> str:
    found = [f"{finding.cause} ({finding.certainty})" for finding in subject.findings]
    return ", ".join(found) or "no finding"
