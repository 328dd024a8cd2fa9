"""A mutant that keeps state between calls, asked one check after the other."""

from collections.abc import Collection, Sequence

from trapline.arena.judge.mutants import MutantHost, Run


class InOrder:
    """Loaded anew, and asked no further than its answers are needed: what it answers to a check
    depends on the checks before, not on those behind."""

    def __init__(
        self,
        host: MutantHost,
        subject: str | dict[str, str],
        checks: Sequence[str],
        judged: Collection[str],
    ) -> None:
        """Of checks that are not `judged` only the state counts, so they start no processes."""
        self._host, self._subject = host, subject
        self._checks, self._judged = checks, frozenset(judged)
        self._runs: dict[str, Run] = {}
        #: How many checks its present process has seen.
        self._seen = 0
        self._process = host.process

    def run(self, check: str) -> Run:
        if self._process is not None and self._host.process is not self._process:
            self._seen = 0  # another subject ended the process, and with it the state
        while check not in self._runs:
            self._ask_next()
        return self._runs[check]

    def _ask_next(self) -> None:
        check = self._checks[self._seen]
        self._runs[check] = self._host.ask_next(
            self._subject, check, first=self._seen == 0, alone=check not in self._judged
        )
        self._seen += 1
        self._process = self._host.process
