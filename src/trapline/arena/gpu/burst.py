"""Many calls in a row, each chosen by what an earlier one wrote. Runs inside the sandbox.

The inputs lie in a ring of slots. A group is a few calls on neighbouring slots. After each group
one element of its last output is fetched; whether it is above a threshold decides with which slot
a later group begins. So calls cannot be skipped, reordered or answered from memory, while two
groups are always under way and the device does not wait for the host.
"""

from typing import Any

#: A group starts from the element that the group before the last one wrote.
LAG = 2


class Burst:
    """What is prepared once: the calls of each group, recorded as graphs where that works."""

    def __init__(self, runner: Any, header: dict[str, Any]) -> None:
        self.runner, self.memory = runner, runner.memory
        self.entry, self.group = header["entry"], header["group"]
        self.slots = [runner.values(nodes) for nodes in header["slots"]]
        self.probes = header["probes"]
        self.mode = "eager"
        self.warm_up()
        if header["graphs"] and self.memory.device == "cuda":
            self.runs = self.record()
        else:
            self.runs = [self.eager(start) for start in range(len(self.slots))]
        self.fetcher = self.memory.fetcher(runner.answer.stream if self.on_gpu else 0, LAG + 1)

    @property
    def on_gpu(self) -> bool:
        return bool(self.memory.device == "cuda")

    def calls(self, start: int) -> list[tuple[str, list[Any]]]:
        count = len(self.slots)
        return [(self.entry, self.slots[(start + k) % count]) for k in range(self.group)]

    def warm_up(self) -> None:
        for entry, values in self.calls(0):
            self.runner.answer.call(entry, values)
        self.memory.drain()

    def eager(self, start: int) -> Any:
        calls = self.calls(start)

        def run() -> None:
            for entry, values in calls:
                self.runner.answer.call(entry, values)

        return run

    def record(self) -> list[Any]:
        """One graph a group; where capturing fails, calls stay eager."""
        try:
            made = [self.runner.answer.record(self.calls(s)) for s in range(len(self.slots))]
            self.memory.drain()
        except Exception:
            self.memory.drain()
            return [self.eager(start) for start in range(len(self.slots))]
        self.mode = "graph"
        return made

    def probe(self, start: int) -> dict[str, Any]:
        found: dict[str, Any] = self.probes[(start + self.group - 1) % len(self.slots)]
        return found

    def run(self, start: int, table: list[list[int]], groups: int, patience: int) -> list[int]:
        """The slots with which the groups began."""
        path: list[int] = []
        waiting: list[dict[str, Any]] = []
        for number in range(groups):
            above = 0
            if number >= patience:
                probe = waiting.pop(0)
                raw = self.fetcher.fetched(number - patience)
                above = int(self.runner.number(probe, raw) > probe["threshold"])
            if path:
                start = table[path[-1]][above]
            path.append(start)
            self.runs[start]()
            probe = self.probe(start)
            address = self.runner.addresses[probe["buffer"]] + probe["offset"]
            self.fetcher.fetch(number, address, probe["size"])
            waiting.append(probe)
        self.memory.drain()
        return path


def kernels(runner: Any, header: dict[str, Any]) -> dict[str, Any]:
    """`op: kernels`: microseconds of each kernel in one call a slot, by torch's profiler.

    A label, not a measure: this process could say anything.
    """
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    slots = [runner.values(nodes) for nodes in header["slots"]]
    runner.answer.call(header["entry"], slots[0])
    runner.memory.drain()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for values in slots:
            runner.answer.call(header["entry"], values)
        runner.memory.drain()
    found: dict[str, float] = {}
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.time_range.elapsed_us()
    return {"kernels": found}


def run(runner: Any, header: dict[str, Any]) -> dict[str, Any]:
    """`op: burst`: prepares on the first request with this number, runs on the others."""
    kept = runner.__dict__.setdefault("bursts", {})
    if "slots" in header:
        kept.clear()
        kept[header["number"]] = made = Burst(runner, header)
        return {"mode": made.mode}
    made = kept[header["number"]]
    path = made.run(header["start"], header["table"], header["groups"], header["patience"])
    return {"path": path}
