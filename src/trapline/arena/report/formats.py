"""Formats of figures: the filters that templates and Markdown share."""

from collections.abc import Sequence

from trapline.arena.standings.costs import Cost
from trapline.arena.standings.ranking import Standing


def figure(value: float) -> str:
    return f"{value:.1f}"


def figure0(value: float) -> str:
    return f"{value:.0f}"


def signed(value: float) -> str:
    """With its sign, which 0.00 has not."""
    text = f"{value:+.2f}"
    return text if float(text) else "0.00"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def chance(value: float) -> str:
    """A probability from resampling; 0 and 1 only where they are exact."""
    if 0 < value < 0.005:
        return "<0.01"
    if 0.995 <= value < 1:
        return ">0.99"
    return f"{value:.2f}"


def rank_set(standing: Standing) -> str:
    """For example 1–3, or 2 where all ranks are equal."""
    if standing.rank_low == standing.rank_high:
        return f"{standing.rank_low}"
    return f"{standing.rank_low}–{standing.rank_high}"


def cost(spent: Cost) -> str:
    """For example 12,340 tokens in, 2,050 out, 7 turns, 3 min 5 s, 0.12 USD."""
    parts = []
    if spent.input_tokens or spent.output_tokens:
        parts.append(f"{spent.input_tokens:,} tokens in, {spent.output_tokens:,} out")
    if spent.turns:
        parts.append(count(spent.turns, "turn"))
    if spent.seconds:
        parts.append(duration(spent.seconds))
    if spent.usd is not None:
        parts.append(f"{spent.usd:.2f} USD")
    return ", ".join(parts)


COST_HEADS = ("tokens in", "cached", "tokens out", "turns", "time", "USD")


def cost_figures(spent: Cost) -> tuple[str, ...]:
    """One figure for each of COST_HEADS."""
    return (
        f"{spent.input_tokens:,}",
        f"{spent.cached_tokens:,}",
        f"{spent.output_tokens:,}",
        f"{spent.turns:,}",
        duration(spent.seconds),
        "–" if spent.usd is None else f"{spent.usd:.2f}",
    )


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def named(names: Sequence[str], most: int = 5) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
