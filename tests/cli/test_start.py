"""Starting the program is cheap: a verb imports what it needs, the list of verbs nothing."""

import os
import signal
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


#: The threads with which NumPy would multiply, as the system counts them.
THREADS = """
import os, sys
from trapline.cli.main import main
try:
    main()
except SystemExit:
    pass
import numpy
numpy.ones((300, 300)) @ numpy.ones((300, 300))
print(len(os.listdir("/proc/self/task")), file=sys.stderr)
"""


def test_judges_multiply_with_one_thread():
    kept = {name: value for name, value in os.environ.items() if "_NUM_THREADS" not in name}
    command = [sys.executable, "-c", THREADS, "grade", "--help"]
    environment = {**kept, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stderr.strip() == "1"


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


#: A KeyboardInterrupt right after an import took a module's lock would leave it locked: another
#: thread that imports the module would wait for ever, and the program for the thread.
INTERRUPTED_IMPORT = """
import os, signal, sys, threading
from trapline.cli.main import guarded

def interrupt(frame, event, _):
    if (frame.f_code.co_filename, frame.f_code.co_name) != (BOOTSTRAP, "acquire"):
        return None
    if event == "return":
        sys.settrace(None)
        os.kill(os.getpid(), signal.SIGINT)
    return interrupt

BOOTSTRAP = "<frozen importlib._bootstrap>"

def program():
    sys.settrace(interrupt)
    try:
        import colorsys
    except KeyboardInterrupt:
        threading.Thread(target=lambda: __import__("colorsys")).start()

guarded(program)
"""


def test_interrupt_inside_an_import_ends_the_program():
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "trapline: interrupted\n"


def test_ignored_interrupt_stays_ignored():
    code = (
        "import os; from trapline.cli.main import guarded; guarded(lambda: os.kill(os.getpid(), 2))"
    )
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0


#: A verb that prints through typer, rich or Python, at once or when the program ends, and fails.
VERB = """
import typer
from rich.console import Console
from trapline.cli.main import guarded

app = typer.Typer()

@app.command()
def verb():
    {}

guarded(lambda: app([]))
"""


def verb(body, **options):
    command = [sys.executable, "-c", VERB.format(body)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        command, stderr=subprocess.PIPE, text=True, env=environment, timeout=60, **options
    )


@pytest.mark.parametrize(
    "body",
    [
        'print("short")',
        'print("short"); raise typer.Exit(4)',
        'print("long " * 100_000)',
        'Console().print("rich")',
    ],
)
def test_closed_pipe_is_quiet(body):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = verb(body, stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_interrupted_verb_says_so():
    done = verb("raise KeyboardInterrupt", stdout=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (130, "trapline: interrupted\n")
