"""The report on loopback during a run: pages are rendered on request."""

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from trapline.arena.certify.certify import Certificate
from trapline.arena.errors import ArenaError
from trapline.arena.report.catalog import ChallengeInfo
from trapline.arena.report.runview import RunView
from trapline.arena.report.site import Site, content_security_policy

HOST = "127.0.0.1"
#: The run is read again at most this often, for any number of requests,
FRESH_SECONDS = 0.3
#: and not before this multiple of the time that reading it took.
SHARE = 5.0
KINDS = {
    "html": "text/html; charset=utf-8",
    "json": "application/json; charset=utf-8",
    "csv": "text/csv; charset=utf-8",
}


class LiveRun:
    def __init__(
        self,
        read: Callable[[], RunView],
        *,
        told: Mapping[str, ChallengeInfo] | None = None,
        certificates: Sequence[Certificate] = (),
    ) -> None:
        self._read = read
        self._told = told
        self._certificates = certificates
        self._lock = threading.Lock()
        # matplotlib's settings are global: one page at a time.
        self._drawing = threading.Lock()
        self._site: Site | None = None
        self._next_read = 0.0

    def site(self) -> Site:
        """The site of the run's present state; kept while no cell changes."""
        with self._lock:
            started = time.monotonic()
            if self._site is None or started >= self._next_read:
                self._site = self._refreshed()
                now = time.monotonic()
                self._next_read = now + max(FRESH_SECONDS, SHARE * (now - started))
            return self._site

    def _refreshed(self) -> Site:
        run = self._read()
        if (old := self._site) is not None:
            seen = old.reading.run
            if list(seen.cells) == list(run.cells) and seen.waiting == run.waiting:
                return old
        return Site(run, told=self._told, certificates=self._certificates, live=True)

    def render(self, path: str) -> str | None:
        site = self.site()
        with self._drawing:
            return site.render(path)

    def state(self) -> dict[str, Any]:
        reading = self.site().reading
        return reading.field.live() | {"version": reading.version}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    live: LiveRun

    def do_GET(self) -> None:
        if not self._is_local():
            self._answer(HTTPStatus.FORBIDDEN, "txt", "This server answers to its own name only.")
            return
        path = unquote(urlsplit(self.path).path).lstrip("/") or "index.html"
        try:
            if path == "live.json":
                body: str | None = json.dumps(self.live.state())
            else:
                body = self.live.render(path)
        except ArenaError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "txt", str(error))
            return
        if body is None:
            self._answer(HTTPStatus.NOT_FOUND, "txt", "There is no such page in this report.")
        else:
            self._answer(HTTPStatus.OK, path.rsplit(".", 1)[-1], body)

    def _is_local(self) -> bool:
        """Refuses foreign host names: a DNS-rebinding page must not read the run."""
        name = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        return name in (HOST, "localhost")

    def _answer(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", KINDS.get(kind, "text/plain; charset=utf-8"))
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", content_security_policy())
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Prints nothing: the terminal belongs to the user."""


class ViewServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, live: LiveRun, port: int = 0) -> None:
        handler = type("RunHandler", (Handler,), {"live": live})
        super().__init__((HOST, port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that the browser closes early is not an error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"
