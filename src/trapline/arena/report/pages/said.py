"""What was said, what was measured: a published report beside the grades of the same answers."""

from typing import Any

from trapline.arena.report import said_measured
from trapline.arena.report.reading import Reading
from trapline.arena.report.said_measured import DECISIONS, SaidMeasured


def context(reading: Reading, found: SaidMeasured) -> dict[str, Any]:
    field = reading.field
    hrefs = {(cell.entrant, cell.challenge): field.cell_href(cell) for cell in field.run.cells}
    titles = {name: info.title for name, info in field.challenges.items()}
    first, *_ = found.letters
    return {
        "title": said_measured.TITLE,
        "said": found,
        "lede": said_measured.LEDE.replace("`", ""),
        "orders": said_measured.ABOUT_ORDERS,
        "about_claims": said_measured.ABOUT_CLAIMS,
        "facts": _facts(found),
        "groups": [
            (titles[name], [one for one in found.cells if one.challenge == name])
            for name in dict.fromkeys(one.challenge for one in found.cells)
        ],
        "hrefs": hrefs,
        "titles": titles,
        "agreements": [
            ("Letters and scores", "Challenge", found.letters),
            ("Points for each criterion and scores", "Criterion", found.criteria),
        ],
        "tau": said_measured.tau,
        "interval": said_measured.interval,
        "decisions": [
            (title, decision, found.decided(decision)) for decision, title in DECISIONS.items()
        ],
        "session_heads": said_measured.SESSION_HEADS,
        "sessions": [
            (model, titles[challenge], said_measured.session_figures(origin))
            for model, challenge, origin in found.sessions
        ],
        "overall": first,
    }


def _facts(found: SaidMeasured) -> list[tuple[str, str, str]]:
    first, *_ = found.letters
    claims = [len(found.decided(decision)) for decision in ("holds", "does not hold")]
    unknown = len(found.decided("cannot be known"))
    return [
        ("Answers", str(len(found.cells)), f"{len(found.graded)} executed"),
        ("Fail their own prompt", str(len(found.failed)), f"{len(found.praised)} had an A"),
        ("Agreement of the orders, τ", said_measured.tau(first.tau), said_measured.interval(first)),
        ("Claims that hold", f"{claims[0]} of {sum(claims)}", f"{unknown} cannot be known"),
    ]
