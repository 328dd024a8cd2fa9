"""Which node of a cluster grades which cell: by free CPUs, and with a pause after a loss."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trapline.arena.errors import ArenaError, InterruptedRunError

#: How long a node pauses after it lost a cell; meanwhile the cluster notices whether it is dead.
REST_SECONDS = 15.0
#: How long to wait for a node when none is left.
NO_NODE_SECONDS = 300.0
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Node:
    id: str
    name: str
    cpus: int


class ClusterSlots:
    """Assigns cells to nodes. A node has a slot for each CPU; `alone` takes all of them."""

    def __init__(self, look: Callable[[], list[Node]]) -> None:
        #: Returns the live nodes.
        self._look = look
        self._nodes: list[Node] = []
        self._looked = -LOOK_SECONDS
        self._taken: dict[str, int] = {}
        self._rests: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        self._closed = False
        self._changed = threading.Condition()

    def take(self, *, alone: bool) -> Node:
        deadline = time.monotonic() + NO_NODE_SECONDS
        with self._changed:
            while True:
                if self._closed:
                    raise InterruptedRunError
                usable = self._usable()
                load = [(self._taken.get(node.id, 0) / node.cpus, node.id, node) for node in usable]
                for *_, node in sorted(load, key=lambda one: one[:2]):
                    need = node.cpus if alone else 1
                    if self._taken.get(node.id, 0) + need <= node.cpus:
                        self._taken[node.id] = self._taken.get(node.id, 0) + need
                        return node
                if usable:
                    deadline = time.monotonic() + NO_NODE_SECONDS
                if self._nodes and all(node.id in self._refused for node in self._nodes):
                    raise ArenaError(self._refused[self._nodes[0].id])
                if time.monotonic() > deadline:
                    raise ArenaError("the cluster has no node left that could grade")
                self._changed.wait(LOOK_SECONDS)

    def _usable(self) -> list[Node]:
        now = time.monotonic()
        if now >= self._looked + LOOK_SECONDS:
            self._nodes, self._looked = self._look(), now
        return [
            node
            for node in self._nodes
            if node.id not in self._refused and self._rests.get(node.id, 0.0) <= now
        ]

    def leave(self, node: Node, *, alone: bool) -> None:
        with self._changed:
            self._taken[node.id] -= node.cpus if alone else 1
            self._changed.notify_all()

    def rest(self, node: Node) -> None:
        """Uses this node no more for a while: a cell was lost there."""
        with self._changed:
            self._rests[node.id] = time.monotonic() + REST_SECONDS

    def refuse(self, node: Node, reason: str) -> None:
        with self._changed:
            self._refused[node.id] = f"{node.name}: {reason}"

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
