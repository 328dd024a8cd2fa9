"""Results of one run that several pages need, computed once."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from statistics import fmean, median
from typing import Any

from trapline.arena.judge.draws import is_held_out
from trapline.arena.record import DIMENSIONS, Cell, Finding
from trapline.arena.report import findings
from trapline.arena.report.catalog import ChallengeInfo, describe
from trapline.arena.report.field import Column, Field
from trapline.arena.report.plots import EntrantPlot
from trapline.arena.report.runview import RunView
from trapline.arena.standings.anatomy import Anatomy, anatomy
from trapline.arena.standings.duel import Duel, duel
from trapline.arena.standings.participation import ranked
from trapline.arena.standings.ranking import Ranking, Standing
from trapline.arena.standings.regrading import Noise, noise
from trapline.arena.standings.shape import Shape, shapes
from trapline.arena.standings.trajectory import Trajectory, by_difficulty, over_stages


class Reading:
    def __init__(self, run: RunView, told: Mapping[str, ChallengeInfo] | None = None) -> None:
        self.run = run
        self.field = Field(run, describe(run.cells, run.waiting, told))
        self._entrant_plots: dict[tuple[str, ...], EntrantPlot] = {}

    @cached_property
    def ranking(self) -> Ranking:
        weights = {
            info.id: info.weights["traps"]
            for info in self.field.challenges.values()
            if "traps" in info.weights
        }
        return ranked(self.run.cells, trap_weight=weights, noise=self.noise)

    @cached_property
    def noise(self) -> Noise:
        return noise(self.run.history)

    @cached_property
    def standing(self) -> dict[str, Standing]:
        return {standing.entrant: standing for standing in self.ranking.standings}

    @cached_property
    def order(self) -> list[str]:
        """Entrants in the order of the standings; those without a place last."""
        named = [*self.standing, *self.ranking.few]
        return named + [name for name in self.field.entrants if name not in named]

    @cached_property
    def cells_of(self) -> dict[str, list[Cell]]:
        """Each entrant's cells in the order of the columns."""
        found: dict[str, list[Cell]] = {name: [] for name in self.field.entrants}
        for name in found:
            for square in self.field.row(name):
                found[name] += square.attempts
        return found

    @cached_property
    def dimension_means(self) -> dict[str, dict[str, float | None]]:
        """Entrant → dimension → mean over its cells, None where it was never measured."""
        return {
            name: {dimension: _mean(cells, dimension) for dimension in DIMENSIONS}
            for name, cells in self.cells_of.items()
        }

    @cached_property
    def dimension_medians(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for dimension in DIMENSIONS:
            values = [
                value
                for means in self.dimension_means.values()
                if (value := means[dimension]) is not None
            ]
            found[dimension] = median(values) if values else None
        return found

    @cached_property
    def measured_dimensions(self) -> list[str]:
        return [name for name in DIMENSIONS if self.dimension_medians[name] is not None]

    @cached_property
    def difficulty(self) -> dict[str, str]:
        return {
            info.id: info.difficulty for info in self.field.challenges.values() if info.difficulty
        }

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        return {shape.entrant: shape for shape in shapes(self.run.cells)}

    @cached_property
    def trajectories(self) -> dict[str, Trajectory]:
        found = by_difficulty(self.run.cells, self.difficulty)
        return {trajectory.entrant: trajectory for trajectory in found}

    @cached_property
    def rounds(self) -> dict[str, Trajectory]:
        """Entrant → its scores by round, where the field declares rounds."""
        declared = self.run.meta.get("rounds") or {}
        found = over_stages(self.run.cells, list(declared.items())) if declared else []
        return {trajectory.entrant: trajectory for trajectory in found}

    @cached_property
    def stages(self) -> list[str]:
        return list(dict.fromkeys(info.difficulty for info in self.field.challenges.values()))

    def stage_of(self, challenge: str) -> int:
        return self.stages.index(self.field.challenges[challenge].difficulty)

    @cached_property
    def column_scores(self) -> dict[Column, dict[str, float]]:
        """Column → entrant → score, of those that have one."""
        return {
            column: {
                name: score
                for name in self.field.entrants
                if (score := self.field.square(name, column).score) is not None
            }
            for column in self.field.columns
        }

    def entrant_plot(self, dimensions: tuple[str, ...]) -> EntrantPlot:
        """The plot whose frame has these dimensions; entrants that share them share it."""
        if dimensions not in self._entrant_plots:
            medians = [self.dimension_medians[name] or 0.0 for name in dimensions]
            stages = [stage or "unrated" for stage in self.stages]
            self._entrant_plots[dimensions] = EntrantPlot(dimensions, medians, stages)
        return self._entrant_plots[dimensions]

    def findings(self, cell: Cell) -> list[Finding]:
        return findings.of_cell(cell, self.field.challenges[cell.challenge])

    @cached_property
    def anatomies(self) -> dict[str, Anatomy]:
        """Of every answer, by its bundle's digest; each bundle is read once."""
        return {digest: anatomy(bundle.files) for digest, bundle in self.run.bundles.items()}

    def duel(self, *entrants: str) -> Duel:
        """These entrants side by side, easiest challenge first."""
        found = duel(self.run.cells, entrants, self.anatomies)
        place = {column: number for number, column in enumerate(self.field.columns)}
        bouts = sorted(found.bouts, key=lambda bout: place[Column(bout.challenge, bout.track)])
        return found.model_copy(update={"bouts": bouts})

    @cached_property
    def version(self) -> str:
        """Changes with every new grade."""
        total = hashlib.sha256()
        for cell in self.run.cells:
            total.update(repr((cell.key, cell.state, cell.score, cell.bundle)).encode())
        return total.hexdigest()[:16]

    @cached_property
    def executed(self) -> bool:
        """Whether anything was or will be executed; a hand-written report has letters only."""
        return bool(self.run.waiting) or any(cell.cases or cell.traps for cell in self.run.cells)

    @cached_property
    def judges(self) -> list[str]:
        found = set()
        for cell in self.run.cells:
            for dimension in cell.dimensions.values():
                judge = dimension.evidence.get("judge")
                if judge:
                    found.add(str(judge))
        return sorted(found)

    @cached_property
    def isolation(self) -> str:
        levels = self.field.isolation
        if not levels:
            return "nothing was executed"
        if len(levels) == 1:
            return levels[0]
        return f"{levels[0]} at the weakest ({', '.join(levels)})"

    @property
    def judged_by(self) -> str:
        if "judged_by" in self.run.meta:
            return str(self.run.meta["judged_by"])
        if self.judges:
            return f"A language model judged the analysis: {', '.join(self.judges)}."
        return "No language model took part in the grading."

    @cached_property
    def graded_by(self) -> str:
        """Which traps graded, and on which half of the situations; empty where nothing ran."""
        cells = [cell for cell in self.run.cells if cell.traps and cell.score is not None]
        if not cells:
            return ""
        releases = sorted({cell.versions.get("trapline", "") for cell in cells} - {""})
        private = {
            f"the private set {one} ({one.digest[:12]})"
            for cell in cells
            if (one := cell.trap_set) is not None
        }
        own = f"those of Trapline {' and '.join(releases)}".rstrip()
        draws = {"held-out" if is_held_out(cell.seed) else "public" for cell in cells}
        return f"Traps: {', '.join([own, *sorted(private)])}; {' and '.join(sorted(draws))} draws."

    @cached_property
    def shared(self) -> dict[str, Any]:
        """Values for the frame of every page."""
        started = [cell.started for cell in self.run.cells]
        return {
            "run_name": self.run.name,
            "run_date": f"{max(started):%Y-%m-%d}" if started and self.executed else "",
            "isolation": self.isolation,
            "judges": self.judged_by,
            "graded_by": self.graded_by,
            "executed": self.executed,
            "field": self.field,
        }


def _mean(cells: list[Cell], dimension: str) -> float | None:
    values = [
        score
        for cell in cells
        if dimension in cell.dimensions and (score := cell.dimensions[dimension].score) is not None
    ]
    return fmean(values) if values else None
