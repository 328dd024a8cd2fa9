"""Formats of figures: the filters that templates and Markdown share."""

from collections.abc import Sequence

from trapline.arena.standings.ranking import Standing


def figure(value: float) -> str:
    return f"{value:.1f}"


def figure0(value: float) -> str:
    return f"{value:.0f}"


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


def named(names: Sequence[str], most: int = 5) -> str:
    if not names:
        return "none"
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
