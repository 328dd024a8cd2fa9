"""One entrant: its cells, its shape over the dimensions, its trajectory, its traps."""

from statistics import fmean
from typing import Any

from trapline.arena.record import DIMENSIONS, Cell
from trapline.arena.report import findings
from trapline.arena.report.reading import Reading
from trapline.arena.standings.margin import TIE_BAND
from trapline.arena.standings.shape import Trait
from trapline.arena.standings.trajectory import Trajectory

MOST_SHOWN = 6


def context(reading: Reading, entrant: str) -> dict[str, Any]:
    cells = reading.cells_of[entrant]
    return {
        "title": entrant,
        "entrant": entrant,
        "standing": reading.standing.get(entrant),
        "ranking": reading.ranking,
        "cells": cells,
        "harnesses": sorted({cell.harness for cell in cells if cell.harness}),
        "models": sorted({cell.model for cell in cells if cell.model}),
        "plot": plot(reading, entrant),
        "dimensions": [
            (name, value, reading.dimension_medians[name])
            for name in reading.measured_dimensions
            if (value := reading.dimension_means[entrant][name]) is not None
        ],
        "shape": shape(reading, entrant),
        "trajectory": trajectory(reading.trajectories.get(entrant)),
        "rounds": trajectory(reading.rounds.get(entrant)),
        "signature": signature(reading, entrant),
        "trapped": any(cell.traps for cell in cells),
        "finding_count": findings.counted([f for cell in cells for f in reading.findings(cell)]),
        "found": [_found(reading, cell) for cell in cells if reading.findings(cell)],
        "best": _best(reading, entrant),
    }


def _found(reading: Reading, cell: Cell) -> dict[str, Any]:
    """One cell's findings, the gravest first, up to a limit."""
    challenge = reading.field.challenges[cell.challenge]
    shown = findings.shown(cell, challenge, None)
    return {
        "cell": cell,
        "title": challenge.title,
        "shown": shown[:MOST_SHOWN],
        "more": len(shown) - len(shown[:MOST_SHOWN]),
    }


def _best(reading: Reading, entrant: str) -> str:
    """The challenge on which the entrant leads the mean of the others most, in a sentence."""
    ahead = []
    for column in reading.field.columns:
        scores = reading.column_scores[column]
        if entrant in scores and len(scores) > 1:
            others = (sum(scores.values()) - scores[entrant]) / (len(scores) - 1)
            ahead.append((scores[entrant] - others, column))
    if len(ahead) < 2 or max(ahead)[0] < TIE_BAND:
        return ""
    lead, column = max(ahead)
    score = reading.column_scores[column][entrant]
    title = reading.field.column_title(column)
    return f"{title}: {score:.1f}, {lead:.1f} points above the mean of the others."


def shape(reading: Reading, entrant: str) -> list[tuple[str, list[str]]]:
    found = reading.shapes.get(entrant)
    if found is None:
        return []
    return [
        ("Strengths", [trait_text(trait) for trait in found.strengths]),
        ("Weaknesses", [trait_text(trait) for trait in found.weaknesses]),
    ]


def trait_text(trait: Trait) -> str:
    """A trait's evidence, with the challenge if it concerns one."""
    where = f" ({', '.join(trait.challenges)})" if trait.kind == "trap" else ""
    return trait.evidence + where


def signature(reading: Reading, entrant: str) -> str:
    """What sets the entrant apart most from the others; empty where nothing does."""
    found = reading.shapes.get(entrant)
    traits = [*found.strengths[:1], *found.weaknesses[:1]] if found else []
    return trait_text(max(traits, key=lambda trait: trait.size)) if traits else ""


def trajectory(found: Trajectory | None) -> str:
    """medium B+ → hard A- → research A (rising): the letters from stage to stage."""
    if found is None:
        return ""
    letters = " → ".join(f"{stage.name} {stage.letter or '—'}" for stage in found.stages)
    return letters if found.trend == "unknown" else f"{letters} ({found.trend})"


def plot(reading: Reading, entrant: str) -> Any:
    """Radar and trajectory; None where nothing was measured."""
    scored = [
        (reading.stage_of(cell.challenge), cell.score)
        for cell in reading.cells_of[entrant]
        if cell.score is not None
    ]
    shape = reading.dimension_means[entrant]
    known = [(name, value) for name in DIMENSIONS if (value := shape[name]) is not None]
    if not scored or not known:
        return None
    means: list[float | None] = []
    for stage in range(len(reading.stages)):
        here = [score for place, score in scored if place == stage]
        means.append(fmean(here) if here else None)
    label = f"{entrant} by dimension: " + ", ".join(f"{name} {value:.0f}" for name, value in known)
    plot = reading.entrant_plot(tuple(name for name, _ in known))
    return plot.render([value for _, value in known], means, scored, label)
