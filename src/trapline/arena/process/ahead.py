"""Sandboxes that start before a check asks for them.

Some checks need the same submission in another process. To start one takes 0.2 s, most of it
NumPy's import, in which the checks before can run on another core.
"""

import contextlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from trapline.arena.errors import ArenaError
from trapline.arena.process.session import SandboxConfig, Session


class SessionsAhead:
    """`count` sessions that wait for their first request; none has loaded the submission."""

    def __init__(self, folder: Path, config: SandboxConfig, count: int) -> None:
        self._folder, self._config = folder, config
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="ahead")
        self._sessions: deque[Future[Session]] = deque(
            self._starter.submit(Session, folder, config) for _ in range(count)
        )
        #: How many were asked for, beyond `count` too.
        self.taken = 0

    def take(self) -> Session:
        self.taken += 1
        if self._sessions:
            return self._sessions.popleft().result()
        return Session(self._folder, self._config)

    def close(self) -> None:
        """Ends those that no check asked for."""
        while self._sessions:
            waiting = self._sessions.popleft()
            if not waiting.cancel():
                with contextlib.suppress(ArenaError):
                    waiting.result().close()
        self._starter.shutdown()
