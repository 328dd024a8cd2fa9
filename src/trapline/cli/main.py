"""`trapline`: collects the verbs and turns errors into sentences and exit codes."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer
from rich.console import Console

import trapline.cli
from trapline.arena.errors import ArenaError, InterruptedRunError, MissingError, UsageError

#: Exit codes: our failure, usage, something missing, a check not held, cells not measured.
FAILURE, USAGE, MISSING, NOT_HELD, INCOMPLETE, INTERRUPTED = 1, 2, 3, 4, 5, 130


def build() -> typer.Typer:
    """The application: every module of this package that has a `register` is a verb."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for found in pkgutil.iter_modules(trapline.cli.__path__):
        module = importlib.import_module(f"trapline.cli.{found.name}")
        if hasattr(module, "register"):
            module.register(app)
    return app


def _show_version(asked: bool) -> None:
    if not asked:
        return
    try:
        typer.echo(f"trapline {version('trapline')}")
    except PackageNotFoundError:
        typer.echo("trapline, from a source tree that is not installed")
    raise typer.Exit


def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Who writes LLM-systems code that you can trust?"""


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of ASCII gets question marks
    guarded(build())


def guarded(program: Callable[[], None]) -> None:
    """What goes wrong with us ends in a sentence and an exit code."""
    try:
        program()
    except InterruptedRunError as error:
        _leave_at_once(error.then)
    except UsageError as error:
        _stop(error, USAGE)
    except MissingError as error:
        _stop(error, MISSING)
    except ArenaError as error:
        _stop(error, FAILURE)
    except OSError as error:  # a full disk, a folder that is not ours
        _stop(error, FAILURE)
    except (MemoryError, RuntimeError) as error:
        if not _is_for_want_of_memory(error):
            raise
        _stop(ArenaError("this machine has not enough memory for what was asked"), FAILURE)


def _is_for_want_of_memory(error: Exception) -> bool:
    """Torch says it in words alone."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "not enough memory" in said or "out of memory" in said


def _stop(error: Exception, code: int) -> NoReturn:
    Console(stderr=True).print(f"trapline: {error}", style="red", markup=False, highlight=False)
    sys.exit(code)


def _leave_at_once(then: str) -> NoReturn:
    """Without waiting for the cells at work: their sandboxes end with us, the store is safe."""
    note = f"trapline: interrupted; what was finished is kept, {then}"
    Console(stderr=True).print(note, markup=False, highlight=False)
    sys.stdout.flush()
    os._exit(INTERRUPTED)
