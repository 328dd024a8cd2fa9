"""Starting the program is cheap: a verb imports what it needs, the list of verbs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trapline.arena.challenge import load_all
from trapline.cli.challenges import summaries
from trapline.cli.main import VERBS, build

SOURCE = Path(__file__).parents[2] / "src"
#: Packages and our own modules that take long to import and that no list needs.
HEAVY = ("scipy", "sqlalchemy", "numpy", "torch", "pandas", "jinja2", "trapline.arena.record")
PROGRAM = """
import sys
from trapline.cli.main import main
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(*sys.modules, sep="\\n", file=sys.stderr)
"""


@pytest.mark.parametrize("args", [["challenges"], ["--help"], ["--version"], ["-h"]])
def test_lists_load_no_heavy_module(args):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", PROGRAM, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout
    assert {*done.stderr.split()} & {*HEAVY} == set()


def test_verbs_without_import_show_the_same_names():
    names = {command.name or command.callback.__name__ for command in build().registered_commands}
    assert names == {*VERBS}
    assert [command.name for command in build("").registered_commands] == [*VERBS]


def test_every_verb_module_is_listed():
    folder = SOURCE / "trapline" / "cli"
    modules = {path.stem for path in folder.glob("*.py") if "\nEXAMPLE = " in path.read_text()}
    assert modules == {*VERBS}


def test_counts_read_from_text_equal_the_loaded_challenges():
    loaded = [
        (one.id, one.plan.difficulty, ", ".join(one.plan.tracks), len(one.cases), len(one.traps))
        for one in load_all().values()
    ]
    assert summaries() == [(*row[:3], str(row[3]), str(row[4])) for row in loaded]
