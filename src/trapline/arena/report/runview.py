"""The view of a run that a report needs, from a store, from published data or from a test."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trapline.arena.certify.red_team import RedTeam
from trapline.arena.errors import UsageError
from trapline.arena.record import Bundle, Cell, CellKey
from trapline.arena.runs.store import Store
from trapline.arena.standings.profiles import of_one_profile
from trapline.arena.studies import ComparisonRow, ReportedField, as_cells, reproduction_table

#: Entrants of one comparison: more columns fit no page.
MOST_CHOSEN = 8


@dataclass(frozen=True)
class RunView:
    cells: Sequence[Cell]
    bundles: Mapping[str, Bundle] = field(default_factory=dict)
    waiting: Mapping[CellKey, str] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    name: str = "run"
    #: All grades, replaced ones included.
    history: Sequence[Cell] = ()
    #: Whether the entrants were chosen for a comparison.
    chosen: bool = False
    #: The figures of a hand-written report beside ours, if the run is such a report.
    reproduction: Sequence[ComparisonRow] = ()
    #: That report.
    printed: ReportedField | None = None

    def only(self, entrants: Sequence[str]) -> "RunView":
        """The run with these entrants alone, to compare them."""
        known = sorted({cell.entrant for cell in self.cells})
        for name in entrants:
            if name not in known:
                raise UsageError(
                    f"no entrant {name!r} in this run; its entrants: {', '.join(known)}"
                )
        if not 2 <= len(set(entrants)) <= MOST_CHOSEN:
            given = ", ".join(entrants) or "none"
            raise UsageError(f"--entrants takes 2 to {MOST_CHOSEN} different entrants, not {given}")
        cells = [cell for cell in self.cells if cell.entrant in entrants]
        digests = [cell.bundle for cell in cells if cell.bundle in self.bundles]
        return replace(
            self,
            cells=cells,
            bundles=Selected(self.bundles, digests),
            waiting={key: state for key, state in self.waiting.items() if key.entrant in entrants},
            history=[cell for cell in self.history if cell.entrant in entrants],
            chosen=True,
        )

    def attacked(self, team: RedTeam | None) -> "RunView":
        if team is None:
            return self
        fact = {"attacks": len(team.attempts), "successes": len(team.succeeded)}
        return replace(self, meta={**self.meta, "red_team": fact})

    @classmethod
    def of_report(cls, field: ReportedField, name: str) -> "RunView":
        meta = {
            "title": "The published field, recomputed",
            "caveat": "the letters are those of the published reports, each scored with the least "
            "that earns it; nothing was executed here",
            "judged_by": "The grades come from the reports' authors, not from us.",
            "rounds": {stage.name: stage.challenges for stage in field.who.stages},
        }
        return cls(
            cells=as_cells(field),
            meta=meta,
            name=name,
            reproduction=reproduction_table(field),
            printed=field,
        )

    @classmethod
    def of(cls, store: Store, profile: str | None = None) -> "RunView":
        """The store's present state under one profile; bundles are read when a page needs them."""
        cells = of_one_profile(store.cells(), profile)
        profiles = {cell.profile for cell in cells}
        return cls(
            cells=cells,
            bundles=StoredBundles(store, [cell.bundle for cell in cells if cell.bundle]),
            waiting=store.waiting(),
            meta=store.meta(),
            name=store.name,
            history=[cell for cell in store.history() if cell.profile in profiles],
        )


class Selected(Mapping[str, Bundle]):
    """Some bundles of a mapping, still read one at a time."""

    def __init__(self, bundles: Mapping[str, Bundle], digests: Sequence[str]) -> None:
        self._bundles, self._digests = bundles, dict.fromkeys(digests)

    def __getitem__(self, digest: str) -> Bundle:
        if digest not in self._digests:
            raise KeyError(digest)
        return self._bundles[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)


class StoredBundles(Mapping[str, Bundle]):
    """A store's bundles by digest, read one at a time to save memory."""

    def __init__(self, store: Store, digests: Sequence[str]) -> None:
        self._store = store
        self._digests = dict.fromkeys(digests)

    def __getitem__(self, digest: str) -> Bundle:
        if digest not in self._digests:
            raise KeyError(digest)
        return self._store.bundle(digest)

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)
