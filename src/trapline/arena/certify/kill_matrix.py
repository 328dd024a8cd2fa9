"""The kill matrix as Markdown: which trap catches which mutant."""

from collections.abc import Sequence

from trapline.arena.certify.certify import Certificate, Outcome
from trapline.arena.challenge import load


def kill_matrix(certificates: Sequence[Certificate]) -> str:
    """One section a challenge."""
    lines = [
        "# Kill matrix",
        "",
        "Written by `trapline certify --write docs/kill-matrix.md`; do not edit.",
        "A named mutant is the gold solution with one bug; its own trap must catch it.",
        "",
        "| challenge | right answers | named killed | controls failed | mechanical killed |",
        "|---|---|---|---|---|",
    ]
    lines += [_summary(certificate) for certificate in certificates]
    for certificate in certificates:
        lines += ["", *_section(certificate)]
    return "\n".join(lines) + "\n"


def _summary(certificate: Certificate) -> str:
    right = certificate.of("right")
    passed = sum(1 for finding in right if not finding.problem)
    shares = [_share(certificate.of(kind)) for kind in ("named", "control", "mechanical")]
    return f"| {certificate.challenge} | {passed}/{len(right)} | {' | '.join(shares)} |"


def _share(findings: Sequence[Outcome]) -> str:
    if not findings:
        return "not run"
    return f"{sum(1 for finding in findings if finding.fell_to)}/{len(findings)}"


def _section(certificate: Certificate) -> list[str]:
    challenge = load(certificate.challenge)
    traps = challenge.forms
    lines = [
        f"## {certificate.challenge}",
        "",
        "| mutant | falls to | severity | catches |",
        "|---|---|---|---|",
    ]
    for finding in certificate.of("named"):
        trap = traps[finding.subject]
        fate = finding.fell_to or "**survives**"
        lines.append(f"| {finding.subject} | {fate} | {trap.severity} | {trap.catches} |")
    survivors = [finding for finding in certificate.of("mechanical") if not finding.fell_to]
    if certificate.of("mechanical"):
        lines += ["", f"Mechanical mutants that survive: {len(survivors)}."]
        lines += [
            f"- `{finding.subject}`: {challenge.survivors.get(finding.subject, finding.message)}"
            for finding in survivors
        ]
        equivalent = challenge.equivalent
        lines += ["", f"Mechanical mutants that change nothing observable: {len(equivalent)}."]
        lines += [f"- `{name}`: {reason}" for name, reason in sorted(equivalent.items())]
    return lines
