"""Claims of a report about single answers: which hold, which do not, which cannot be known.

A claim is decided by a figure that the grade took of the answer, by a finding, by the answer's own
tests, or by counting in its files.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trapline.arena.record import Cell, Record
from trapline.arena.studies.records import Fact, Holders, ReportedField
from trapline.arena.studies.said import PROFILE, models_of

Decision = Literal["holds", "does not hold", "cannot be known"]
#: Path → text of an answer's files.
Files = Mapping[str, str]
Said = float | str
#: Counts within this share of each other agree, as elsewhere in the study.
CLOSE = 0.05
#: Below this error, all is rounding.
ROUNDING = 1e-14


@dataclass(frozen=True)
class Answer:
    """What is known of an answer: its grade, its files, and figures taken of it."""

    cell: Cell
    files: Files = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    #: Why there are no figures.
    not_figured: str = ""


class CheckedClaim(Record):
    model: str
    challenge: str
    quantity: str
    said: str
    #: What was measured or counted, or why nothing was.
    found: str
    #: How it was found: measured, read, or empty.
    by: Literal["measured", "read", ""]
    verdict: Decision
    source: str


#: What was found, how, and whether the claim holds.
Found = tuple[str, Literal["measured", "read", ""], Decision]


def checked_claims(
    field: ReportedField, cells: Sequence[Cell], answer_of: Callable[[Cell], Answer]
) -> list[CheckedClaim]:
    """Each printed figure or word about an answer that lies here."""
    models = models_of(field, {cell.entrant for cell in cells})
    here = {
        (models[cell.entrant], cell.challenge): cell
        for cell in cells
        if cell.entrant in models and cell.profile == PROFILE
    }
    found: list[CheckedClaim] = []
    for fact in [*field.facts.fact, *_held(field)]:
        for model, said in fact.values.items():
            cell = here.get((model, fact.challenge))
            if cell is not None:
                found.append(_checked(fact, model, said, answer_of(cell)))
    return found


#: Properties of which a report lists holders → the challenge, and what the fact is called.
_PROPERTIES = {"parent-indexed logits in DFlash": ("dflash", "parent-indexed logits")}


def _held(field: ReportedField) -> Iterator[Fact]:
    """Who has a property and, where the list is complete, who does not."""
    for one in field.claims.holders:
        if one.property in _PROPERTIES:
            challenge, quantity = _PROPERTIES[one.property]
            values = _values(one, [m for m in field.who.models if challenge in field.took(m)])
            yield Fact(challenge=challenge, quantity=quantity, source=one.source, values=values)


def _values(one: Holders, took_part: Sequence[str]) -> dict[str, float | str]:
    """Yes for the holders, no for the others where the list is complete."""
    values: dict[str, float | str] = {}
    for model in took_part:
        if model in one.models or one.complete:
            values[model] = "yes" if model in one.models else "no"
    return values


def _checked(fact: Fact, model: str, said: Said, answer: Answer) -> CheckedClaim:
    found, by, verdict = _found(fact, said, answer)
    shown = said if isinstance(said, str) else f"{said:g}"
    return CheckedClaim(
        model=model,
        challenge=fact.challenge,
        quantity=fact.quantity,
        said=f"{shown} {fact.unit}".strip(),
        found=found,
        by=by,
        verdict=verdict,
        source=fact.source,
    )


def _found(fact: Fact, said: Said, answer: Answer) -> Found:
    if fact.quantity in _BY_READING:
        return _read(_BY_READING[fact.quantity](answer.files), said)
    if fact.quantity in _LIBRARIES_OF:
        return _library(answer.files, said)
    if answer.cell.score is None:
        return answer.cell.reason, "", "cannot be known"
    if fact.quantity in _FIGURES:
        return _figure(fact, said, answer)
    if fact.quantity in _CAUSES:
        return _cause(*_CAUSES[fact.quantity], said, answer.cell)
    if fact.quantity == "correctness of the answer":
        return _correct(said, answer.cell)
    if fact.quantity == "own tests":
        return _own_tests(said, answer)
    return "it is not measured here", "", "cannot be known"


def _verdict(holds: bool) -> Decision:
    return "holds" if holds else "does not hold"


# --- figures that the grade took ------------------------------------------------------------------


def _agree(said: float, got: float) -> bool:
    return abs(said - got) <= CLOSE * max(abs(said), abs(got))


def _no_larger(said: float, got: float) -> bool:
    """Reports differ in what an error is relative to, and finite differences have one too."""
    return got <= max(said, ROUNDING)


_FIGURES: dict[str, Callable[[float, float], bool]] = {
    "relative error of dx": _no_larger,
    "relative error of dgamma": _no_larger,
    "relative error of dbeta": _no_larger,
    "largest error of dx": _no_larger,
    "items in the cache": _agree,
    "relative error": _no_larger,
    "gradient error": _no_larger,
    "error of dq against the naive gradient": _no_larger,
}


def _figure(fact: Fact, said: Said, answer: Answer) -> Found:
    got = answer.figures.get(fact.quantity)
    if not isinstance(got, float | int) or isinstance(said, str):
        return answer.not_figured or "the grade has no such figure", "", "cannot be known"
    shown = f"{got:.3g} {fact.unit}".strip()
    return shown, "measured", _verdict(_FIGURES[fact.quantity](said, float(got)))


# --- findings and the answer's own tests ----------------------------------------------------------

_ROWS = ("judged-by-its-own-row", "judged-by-the-row-before", "judged-by-depth")
#: Quantity → the causes that decide it, and the words for "one was found" and "none was".
_CAUSES = {
    "EOS removal bug": (("finished-beams-dropped", "finished-beams-leave"), "present", "absent"),
    "parent-indexed logits": (_ROWS, "no", "yes"),
    "(N, N) matrix": (("score-matrix-in-memory", "mask-for-all-pairs"), "held", "never held"),
}


def _cause(causes: Sequence[str], bad: str, good: str, said: Said, cell: Cell) -> Found:
    named = [finding.cause for finding in cell.findings if finding.cause in causes]
    if not named and cell.findings:
        return "other findings may hide it", "", "cannot be known"
    got = bad if named else good
    return f"{got} ({', '.join(named) or 'no such finding'})", "measured", _verdict(said == got)


def _correct(said: Said, cell: Cell) -> Found:
    """`correct` or `has bugs`, against the contract of the prompt."""
    if cell.state == "pass" and said != "correct":
        return "none within what the prompt asks; other code was not run", "", "cannot be known"
    named = ", ".join(finding.cause for finding in cell.findings)
    got = "correct" if cell.state == "pass" else f"has bugs ({named})"
    return got, "measured", _verdict((said == "correct") == (cell.state == "pass"))


def _own_tests(said: Said, answer: Answer) -> Found:
    """`all pass` or `none`."""
    if not _tests(answer.files)[0]:
        if said == "none":
            return "none in its files", "read", "holds"
        return "no function of its files is named a test", "", "cannot be known"
    ran = answer.cell.dimensions.get("tests")
    told = ran.reason.removeprefix("not weighed: ") if ran else "they were not run"
    if ran is None or "no report" in told:
        return told, "", "cannot be known"
    if told.startswith("the answer has no test files"):
        return "they are not in test files, which alone are run", "", "cannot be known"
    passes = told == "its tests pass on its own code"
    return told, "measured", _verdict((said == "all pass") == passes)


# --- what can be counted in the files -------------------------------------------------------------


def _read(counts: Sequence[int], said: Said) -> Found:
    if not any(counts) and said != 0:
        return "the files show none to count", "", "cannot be known"
    shown = " or ".join(str(one) for one in dict.fromkeys(counts))
    agrees = not isinstance(said, str) and any(_agree(said, one) for one in counts)
    return shown, "read", _verdict(agrees)


#: The names of libraries, as reports write them, by module.
_LIBRARIES = {"numpy": "NumPy", "mlx": "MLX"}
_LIBRARIES_OF = ("array library",)


def _library(files: Files, said: Said) -> Found:
    """What the code imports."""
    known = {
        name
        for text in _code(files).values()
        for module, name in _LIBRARIES.items()
        if re.search(rf"^\s*(import|from) {module}\b", text, re.MULTILINE)
    }
    if not known:
        return "the files import none", "", "cannot be known"
    return " and ".join(sorted(known)), "read", _verdict(said in known)


def _code(files: Files) -> dict[str, str]:
    names = [name for name in files if name.endswith(".py") and name != "adapter.py"]
    return {name: files[name] for name in names}


def _lines(files: Files) -> list[int]:
    """Lines of the longest file and of all files, with and without empty and comment lines."""
    texts = sorted((text.splitlines() for text in _code(files).values()), key=len)
    if not texts:
        return []
    counted: list[int] = []
    for lines in (texts[-1], [line for text in texts for line in text]):
        filled = [line for line in lines if line.strip()]
        plain = [line for line in filled if not line.strip().startswith("#")]
        counted += [len(lines), len(filled), len(plain)]
    return counted


def _tests(files: Files) -> list[int]:
    """Functions whose names begin with `test`, in whichever file."""
    return [_named(files, "test")]


def _tests_and_demos(files: Files) -> list[int]:
    tests = _named(files, "test")
    return [tests, tests + _named(files, "demo")]


def _named(files: Files, prefix: str) -> int:
    return sum(
        isinstance(node, ast.FunctionDef) and node.name.startswith(prefix)
        for text in _code(files).values()
        for node in _top_level(text)
    )


def _files(files: Files) -> list[int]:
    """Files of code, and these together with the notes."""
    notes = [name for name in files if name.endswith(".md") and "prompt" not in name.lower()]
    code = len(_code(files))
    return [code, code + 1, code + len(notes)] if notes else [code]


def _top_level(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


#: What can be counted in an answer's files, in each way that a report may have counted it.
_BY_READING: dict[str, Callable[[Files], list[int]]] = {
    "lines of code": _lines,
    "tests": _tests,
    "tests or demos": _tests_and_demos,
    "files": _files,
}
