"""`trapline`: collects the verbs and turns errors into one sentence and an exit code."""

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from types import FrameType
from typing import Annotated, NoReturn

import typer

from trapline.arena.errors import (
    ArenaError,
    ChangedError,
    InterruptedRunError,
    MissingError,
    UsageError,
)
from trapline.cli.exit_codes import (
    FAILURE,
    INTERRUPTED,
    MISSING,
    NOT_HELD,
    PIPE_CLOSED,
    USAGE,
)

#: The verbs, in the order of `--help`, with the line that it shows. `trapline.cli.<verb>` holds the
#: command, a function of the same name, and an EXAMPLE; only the verb that runs is imported.
VERBS = {
    "demo": "Grade the example field that ships with Trapline and write its report.",
    "challenges": "List the challenges and count their cases and traps.",
    "deploy": "Make workspaces that hold a prompt and a starter.",
    "solve": "Let a model or an agent fill workspaces.",
    "adopt": "Make a field of answers that were written to other prompts.",
    "grade": "Grade every answer of a field and print the matrix.",
    "rank": "Rank the entrants of a run, with 95 % intervals.",
    "duel": "Compare entrants challenge by challenge.",
    "report": "Write a run as a site, as Markdown or as a table.",
    "view": "Serve the report of a run, live while it is graded.",
    "reproduce": "Write the failing call of a finding as a script of its own.",
    "replay": "Grade an evidence bundle again and compare the verdicts.",
    "sign": "Sign the evidence bundles of a run with a minisign key.",
    "verify": "Check the digests and signatures of evidence bundles.",
    "lint": "List the contradictions between the numbers of a run.",
    "scan": "Search answers for leaked judge files and for copies.",
    "redact": "Remove names, paths, addresses and keys from transcripts.",
    "export": "Write tasks, logs or predictions for other tools.",
    "certify": "Check that the traps themselves work.",
    "memory": "Compute how many tokens of KV cache fit beside a model.",
    "generate": "Continue a prompt with a language model.",
    "serve": "Serve a language model with OpenAI's API.",
    "train": "Train an all-ternary language model on text files.",
    "pack": "Write a ternary checkpoint with 2 bits per weight, or as GGUF.",
}
#: The verbs that judge answers.
GRADING = ("demo", "grade", "replay", "certify")

#: The exit codes of errors that are not a failure of the program itself.
_CODES = ((UsageError, USAGE), (MissingError, MISSING), (ChangedError, NOT_HELD))


def build(only: str | None = None) -> typer.Typer:
    """The application with all its verbs; of the others than `only`, just name and summary."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for verb, summary in VERBS.items():
        if only is None or verb == only:
            module = importlib.import_module(f"trapline.cli.{verb}")
            app.command(epilog=f"Example: {module.EXAMPLE}")(getattr(module, verb))
        else:
            app.command(verb, short_help=summary)(_not_imported)
    return app


def _not_imported() -> None:
    """Stands for a verb that this command line does not run."""


def _show_version(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        typer.echo(f"trapline {version('trapline')}")
    except PackageNotFoundError:
        typer.echo("trapline, from a source tree that is not installed")
    raise typer.Exit


def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Who writes LLM-systems code that you can trust?"""


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of ASCII gets question marks
    # The program itself has no option with a value: the first other word is the verb.
    verb = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if verb in GRADING:
        # Before NumPy is imported. Its threads would compete with the cells graded meanwhile.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    completing = "_TRAPLINE_COMPLETE" in os.environ
    guarded(lambda: build(None if completing else verb)())


def guarded(program: Callable[[], None]) -> None:
    """Runs the program; an error that we foresee becomes one sentence and an exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        _flushed(program)
    except SystemExit as ended:  # typer and rich end the program themselves
        if isinstance(ended.__context__, BrokenPipeError):
            _leave_closed_pipe()
        if ended.code == INTERRUPTED:
            _print_error("interrupted")
        raise
    except InterruptedRunError as error:
        # Does not wait for cells in progress: their sandboxes end with us, the store is safe.
        _print_error(f"interrupted; {error.then}")
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    except BrokenPipeError:
        _leave_closed_pipe()
    except (ArenaError, OSError) as error:  # OSError: a full disk, a folder without permission
        _stop(error, next((code for kind, code in _CODES if isinstance(error, kind)), FAILURE))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _stop("this machine does not have enough memory for this command", FAILURE)


def _flushed(program: Callable[[], None]) -> None:
    """Runs the program and writes what is left of its output, while an error can be told."""
    try:
        program()
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _leave_closed_pipe() -> NoReturn:
    """Ends without a word, also about what Python still holds back for the pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2) if _is_closed(2) else (1,):
        os.dup2(nowhere, stream)
    sys.exit(PIPE_CLOSED)


def _is_closed(stream: int) -> bool:
    """Whether nobody can read any more what is written there."""
    waiting = select.poll()
    waiting.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in waiting.poll(0))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, except inside an import, where the signal ends the program.

    Raised there it can leave an import lock held, and the program waits for that lock for ever.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"trapline: interrupted\n")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        frame = frame.f_back
    raise KeyboardInterrupt


def _is_out_of_memory(error: Exception) -> bool:
    """Torch raises a RuntimeError that only its text tells apart."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "not enough memory" in text or "out of memory" in text


def _print_error(text: str, style: str | None = None) -> None:
    from rich.console import Console

    Console(stderr=True).print(f"trapline: {text}", style=style, markup=False, highlight=False)


def _stop(error: Exception | str, code: int) -> NoReturn:
    _print_error(str(error), "red")
    sys.exit(code)
