"""Harbor's verifier: `python -m trapline.arena.export.verifier CHALLENGE WORKSPACE LOGS`."""

import json
import sys
from pathlib import Path

from trapline.arena.challenge import load
from trapline.arena.errors import ArenaError
from trapline.arena.export.grading import dimension_scores, grade_folder
from trapline.arena.record import Cell
from trapline.arena.runs.store import canonical


def rewards(cell: Cell) -> dict[str, float]:
    """Flat and numeric, as Harbor wants it: the grade, each dimension and each trap, all 0 to 1."""
    found = {"reward": (cell.score or 0.0) / 100.0}
    found |= {name: score / 100.0 for name, score in dimension_scores(cell).items()}
    found |= {f"trap-{trap.id}": float(not trap.accuses) for trap in cell.traps}
    return {name: round(value, 4) for name, value in found.items()}


def verify(challenge_id: str, workspace: Path, logs: Path) -> None:
    """Writes `reward.json` and the evidence; no reward when nothing can be said."""
    bundle = grade_folder(load(challenge_id), workspace, "harbor")
    cell = bundle.cell
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "evidence.json").write_text(canonical(bundle), encoding="utf-8")
    if cell.score is None:
        raise ArenaError(f"not measured: {cell.reason}")
    (logs / "reward.json").write_text(json.dumps(rewards(cell), indent=1) + "\n", encoding="utf-8")
    print(f"{challenge_id}: {cell.letter} {cell.score} {cell.state}: {cell.reason}")


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit("usage: python -m trapline.arena.export.verifier CHALLENGE WORKSPACE LOGS")
    try:
        verify(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except ArenaError as error:
        sys.exit(f"trapline: {error}")


if __name__ == "__main__":
    main()
