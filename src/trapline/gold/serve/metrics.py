"""Counters of the server in Prometheus' text format."""

from collections import Counter
from collections.abc import Mapping

#: Upper bounds in seconds; +Inf follows.
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """Durations in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        place = next((i for i, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))
        self._counts[place] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        total, shown = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            shown.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*shown, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """What the event loop counts; the engine's own numbers come with `text`."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.disconnects = 0
        self.first_token, self.duration = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, tuple[str, float]], generated: int) -> str:
        """`gauges` maps a name to its help text and value."""
        lines = _described("trapline_requests_total", "counter", "Answered HTTP requests.")
        for (path, status), count in sorted(self.requests.items()):
            labels = f'path="{path}",status="{status}"'
            lines.append(f"trapline_requests_total{{{labels}}} {count}")
        for name, helped, value in (
            ("prompt_tokens", "Tokens of accepted prompts.", self.prompt_tokens),
            ("generated_tokens", "New tokens.", generated),
            ("disconnects", "Requests whose client left early.", self.disconnects),
        ):
            lines += _described(f"trapline_{name}_total", "counter", helped)
            lines.append(f"trapline_{name}_total {value}")
        for name, (helped, number) in gauges.items():
            lines += _described(f"trapline_{name}", "gauge", helped)
            lines.append(f"trapline_{name} {number:g}")
        for name, helped, histogram in (
            ("first_token_seconds", "Time to the first token of a request.", self.first_token),
            ("request_seconds", "Time of a generating request.", self.duration),
        ):
            lines += _described(f"trapline_{name}", "histogram", helped)
            lines += histogram.lines(f"trapline_{name}")
        return "\n".join(lines) + "\n"


def _described(name: str, kind: str, helped: str) -> list[str]:
    return [f"# HELP {name} {helped}", f"# TYPE {name} {kind}"]
