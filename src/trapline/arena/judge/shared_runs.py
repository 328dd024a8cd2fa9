"""What our mutants answered, kept for further answers that meet the same situations."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

#: Of all that is kept; what was not asked for longest goes first.
MOST_BYTES = 256 << 20


class SharedRuns:
    """Pickled runs of mutants; the cells of a run are graded in several threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._bytes = most_bytes, 0
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()
        #: Held while a run is made.
        self._making: dict[Hashable, threading.Lock] = {}

    def once(self, key: Hashable, make: Callable[[], bytes | None]) -> bytes | None:
        """What is kept, or else what `make` gives, unless that is None. Who asks for what is being
        made waits for it: cells of one challenge are graded side by side and ask alike."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        try:
            with making:
                run = self.get(key)
                if run is None:
                    run = make()
                    if run is not None:
                        self.put(key, run)
        finally:
            with self._lock:
                self._making.pop(key, None)
        return run

    def get(self, key: Hashable) -> bytes | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: Hashable, run: bytes) -> None:
        with self._lock:
            self._bytes += len(run) - len(self._kept.pop(key, b""))
            self._kept[key] = run
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1])
