"""A grader to be killed: grades a field of the sorting challenge into a run, checks only."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from trapline.arena import challenge
from trapline.arena.challenge import Challenge
from trapline.arena.judge import grade
from trapline.arena.runs import field, run
from trapline.cli.main import guarded


def main(field_folder: str, run_place: str) -> None:
    """No measures: their noise would make two undisturbed runs differ."""
    sorting = Challenge(Path(__file__).parents[1] / "sorting", "sorting")
    challenge.load_all.cache_clear()
    for module in (challenge, field):
        module.load_all = lambda *_: {"sorting": sorting}
    grade._measures = lambda _: []
    entries = field.find_entries(Path(field_folder), [])
    # However many cores there are: some cells must be left when the first one is graded.
    options = run.Options(run.choose_level(), workers=2)
    with run.open_run(run_place) as store:
        store.set_meta(seed=11)
        for cell in run.grade_field(entries, store, options):
            print(cell.entrant, flush=True)


if __name__ == "__main__":
    guarded(lambda: main(*sys.argv[1:]))
