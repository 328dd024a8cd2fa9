"""Runs the application on uvicorn until a signal: no new requests, then the running ones end."""

import signal
import socket
from types import FrameType

import uvicorn

from trapline.gold.serve.app import Service


class Server(uvicorn.Server):
    """Tells the service that a signal came, so that requests on open connections are refused.

    A signal is the normal way to stop: the process ends without an error. A second Ctrl-C does not
    wait for running answers.
    """

    def __init__(self, service: Service, *, grace: int) -> None:
        super().__init__(
            uvicorn.Config(
                service.application(),
                lifespan="on",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=grace,
            )
        )
        self._service = service

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = self._service.draining = True


def bound(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 chooses a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1024)
    except BaseException:
        made.close()
        raise
    return made
