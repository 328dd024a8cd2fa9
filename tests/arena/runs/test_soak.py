"""A long life: graders come and go over one store, and the table is that of an undisturbed run.

TRAPLINE_SOAK_MINUTES says how long each store is disturbed. Other programs that come and go would
be taken for leftovers in /dev/shm: `unshare --mount` gives the soak one of its own.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trapline.arena.process.isolation import cgroups
from trapline.arena.runs.store import Store

GRADER = Path(__file__).with_name("soak_grader.py")
MINUTES = float(os.environ.get("TRAPLINE_SOAK_MINUTES", "1"))
DAY = 86_400
#: A grader may take a moment to stop when it is asked to.
STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Soak:
    """A field, a store, and everything that happens to them."""

    def __init__(self, root, sorting, run):
        self.field, self.temporary, self.run = root / "field", root / "temporary", run
        self.temporary.mkdir(parents=True)
        gold = sorting.solution_files()["solution.py"]
        mutants = [trap.plant({"solution.py": gold})["solution.py"] for trap in sorting.traps]
        #: Entrants that are still to come, the last one first.
        self.coming = [(f"mutant-{n}", source) for n, source in enumerate(mutants, 1)][::-1]
        self.sources = {}
        self.add("gold", gold)
        self.add(*self.coming.pop())
        self.owners, self.chance, self.rounds = [], random.Random(1), 0
        #: Of the graders with a late clock and with a full disk.
        self.codes = []

    def add(self, entrant, source):
        self.sources[entrant] = source
        folder = self.field / entrant / "sorting"
        folder.mkdir(parents=True)
        (folder / "solution.py").write_text(source)

    def change(self, entrant, comment):
        """Other bytes, the same program: its cell is graded again."""
        path = self.field / entrant / "sorting" / "solution.py"
        path.write_text(self.sources[entrant] + comment)

    def start(self, run=None, clock=0, limit="unlimited"):
        command = f'ulimit -f {limit}; exec "$@"'
        arguments = [sys.executable, str(GRADER), str(self.field), str(run or self.run)]
        grader = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            env=os.environ | {"TMPDIR": str(self.temporary), "SOAK_CLOCK": str(clock)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.owners.append(grader.pid)
        return grader

    def finish(self, run=None):
        grader = self.start(run)
        _, errors = grader.communicate(timeout=600)
        assert grader.returncode == 0, errors
        return table(run or self.run)

    def disturb(self, seconds):
        """Until the time is over. Once the clock is a day late, and once the disk is full."""
        started, newcomers = time.monotonic(), len(self.coming)
        events = [(0.3, {"clock": -DAY}), (0.6, {"limit": 40})]
        while (share := (time.monotonic() - started) / seconds) < 1:
            if self.coming and share > (newcomers - len(self.coming) + 1) / (newcomers + 1):
                self.add(*self.coming.pop())
            if events and share > events[0][0]:
                self.suffer(**events.pop(0)[1])
                continue
            self.change_one()
            graders = [self.start() for _ in range(self.chance.choice((1, 1, 2)))]
            time.sleep(self.chance.uniform(0.2, 6.0))
            for grader in graders:
                grader.send_signal(self.chance.choice(STOPS))
            for grader in graders:
                self.wait(grader)
        for _, event in events:  # a busy machine can be late for them
            self.suffer(**event)

    def suffer(self, **event):
        self.change_one()
        self.codes.append(self.wait(self.start(**event)))

    def change_one(self):
        self.rounds += 1
        self.change(self.chance.choice(sorted(self.sources)), f"\n# {self.rounds}\n")

    def wait(self, grader):
        grader.communicate(timeout=300)
        return grader.returncode

    def restore(self):
        while self.coming:
            self.add(*self.coming.pop())
        for entrant in self.sources:
            self.change(entrant, "")


def table(run):
    store = Store(run, create=False)
    try:
        cells = store.cells()
        assert store.waiting() == {}
        assert all(store.has_bundle(cell.bundle) for cell in cells)
        return [
            (c.entrant, c.state, c.score, tuple(c.fallen()), c.submission_digest) for c in cells
        ]
    finally:
        store.close()


def groups_of(owners):
    """Control groups that processes of ours have left; a group with a process in it stays.

    All graders have ended: a living process with such a number is another program's.
    """
    return [
        path
        for parent in cgroups._parents()
        for owner in owners
        if not Path(f"/proc/{owner}").exists()
        for path in parent.glob(f"trapline-{owner}-*")
    ]


def shared_memory():
    folder = Path("/dev/shm")
    return set(os.listdir(folder)) if folder.is_dir() else set()


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["folder", "server"])
def test_disturbed_run_equals_an_undisturbed_one(kind, sorting, tmp_path, request):
    run = tmp_path / "run" if kind == "folder" else request.getfixturevalue("postgres").new_run()
    soak, before = Soak(tmp_path, sorting, run), shared_memory()
    soak.disturb(60 * MINUTES)
    soak.restore()
    assert soak.finish() == soak.finish(tmp_path / "undisturbed")
    assert len(soak.sources) == 6
    late, full = soak.codes
    assert late == 0
    assert full != 0 or kind == "server"  # a server writes its files itself
    assert soak.rounds >= 3 * MINUTES
    assert [p.name for p in soak.temporary.iterdir() if p.suffix != ".timing"] == []
    assert groups_of(soak.owners) == []
    assert not shared_memory() - before
    print(f"{kind}: {soak.rounds} rounds, {len(soak.owners)} graders in {MINUTES:g} minutes")
