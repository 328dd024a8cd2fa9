"""What a hand-written report printed: its sources, and its figures where they belong."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from trapline.arena.report import evidence
from trapline.arena.report.reading import Reading
from trapline.arena.studies.records import Fact, Source


def sources(reading: Reading) -> dict[str, Any] | None:
    """Who published what, with links; None where the run is not such a report."""
    printed = reading.run.printed
    if printed is None:
        return None
    used = Counter(name for row in reading.run.reproduction for name in row.sources)
    who = printed.who
    return {
        "publisher": who.publisher,
        "rows": [(printed.source(name), count) for name, count in sorted(used.items())],
        "harnesses": [(h.name, h.stage, h.models, printed.source(h.source)) for h in who.harness],
    }


def of_challenge(reading: Reading, challenge: str) -> dict[str, Any] | None:
    """Score cards, figures and edges that were printed about one challenge."""
    printed = reading.run.printed
    if printed is None:
        return None
    cards = [card for card in printed.scores.card if card.challenge == challenge]
    facts = [fact for fact in printed.facts.fact if fact.challenge == challenge]
    models = [name for name in reading.order if any(name in fact.values for fact in facts)]
    return {
        "dimensions": list(dict.fromkeys(name for card in cards for name in card.dimensions)),
        "cards": [(card, printed.source(card.source)) for card in cards],
        "models": models,
        "facts": [_fact(fact, models, printed.source(fact.source)) for fact in facts],
        "edges": [
            (f"{match.a} and {match.b}", edges, printed.source(match.source))
            for match in printed.matchups.matchup
            if (edges := match.edges.get(challenge))
        ],
    }


def _fact(fact: Fact, models: Sequence[str], source: Source) -> dict[str, Any]:
    values = [fact.values.get(name) for name in models]
    return {
        "what": f"{fact.quantity}, {fact.unit}" if fact.unit else fact.quantity,
        "values": ["" if value is None else evidence.text(value) for value in values],
        "note": fact.note,
        "source": source,
    }
