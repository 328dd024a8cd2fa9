"""What entrants' answers took together. No place depends on it."""

from collections.abc import Iterable

from trapline.arena.record import Cell, Record


class Cost(Record):
    """Sums over the answers whose origin tells them."""

    answers: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    turns: int
    seconds: float
    #: None unless each of these answers tells its price.
    usd: float | None


def total_cost(cells: Iterable[Cell]) -> Cost | None:
    """None if no cell tells tokens, turns or time."""
    told = [cell.origin for cell in cells if cell.origin is not None]
    told = [origin for origin in told if origin.output_tokens or origin.turns or origin.seconds]
    if not told:
        return None
    dollars = [origin.cost_usd for origin in told if origin.cost_usd is not None]
    return Cost(
        answers=len(told),
        input_tokens=sum(origin.input_tokens for origin in told),
        cached_tokens=sum(origin.cached_tokens for origin in told),
        output_tokens=sum(origin.output_tokens for origin in told),
        turns=sum(origin.turns for origin in told),
        seconds=round(sum(origin.seconds for origin in told), 1),
        usd=round(sum(dollars), 6) if len(dollars) == len(told) else None,
    )
