"""`trapline view`: serves the report on loopback, live during a run."""

import contextlib
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.errors import UsageError
from trapline.arena.report.runview import RunView
from trapline.arena.report.server import LiveRun, ViewServer
from trapline.cli.reading import PUBLISHED, ProfileOption, Run, opened, published
from trapline.cli.report import read_certificates

EXAMPLE = "trapline view runs/demo --port 8100"


def view(
    run: Run = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 chooses a free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the first page in a browser.")] = True,
    certificates: Annotated[
        Path | None, typer.Option(help="Output of `trapline certify --json`.")
    ] = None,
    profile: ProfileOption = None,
) -> None:
    """Serve the report of a run, finished or not, until interrupted."""
    known = read_certificates(certificates)
    if run == PUBLISHED:
        told = RunView.of_report(published(), PUBLISHED)
        _serve(LiveRun(lambda: told, certificates=known), port, browser)
        return
    with opened(run) as store:
        _serve(LiveRun(lambda: RunView.of(store, profile), certificates=known), port, browser)


def _serve(live: LiveRun, port: int, browser: bool) -> None:
    try:
        server = ViewServer(live, port)
    except OSError as error:
        raise UsageError(f"port {port} cannot be used: {error.strerror}") from None
    with server:
        print(server.url, flush=True)
        if browser:
            webbrowser.open(server.url)
        # Ctrl-C is the normal way to stop.
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
