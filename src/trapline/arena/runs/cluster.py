"""Grades on a Ray cluster: each cell on a node with room, and on another when that node dies.

Ray carries the request to a node and the verdict back; this module chooses the node. A cell that
takes times gets all CPUs of a node, so that no other task runs beside it; the cluster needs no
custom resources for this. The submission travels with the task, the challenges come from the
package installed on the node, and only the driver knows the store.
"""

import importlib
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError, InterruptedRunError, MissingError
from trapline.arena.judge.grade import OnStep, grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.sandbox import probe
from trapline.arena.record import LEVELS, Bundle, Level
from trapline.arena.runs.cluster_slots import ClusterSlots, Node
from trapline.arena.runs.executor import is_weaker, refuse_contradiction
from trapline.arena.runs.run import check_machine
from trapline.arena.runs.store import canonical

#: Threads that wait for a slot cost nothing; nodes may join during a run.
MOST_CELLS_AT_ONCE = 256
#: A cell that loses its worker this often may be what kills it, and is not graded.
MOST_LOSSES = 4
CONNECT_SECONDS = 10.0


class LostError(ArenaError):
    """A node or a worker process ended during a grade; says nothing about the submission."""


class RefusedError(ArenaError):
    """A node that cannot grade."""


class Cluster:
    def __init__(self, address: str, workers: int | None = None) -> None:
        self._ray = _connect(address)
        self._task = self._ray.remote(grade_on_node)
        self._running: set[Any] = set()
        self.width = workers or MOST_CELLS_AT_ONCE
        self.slots = ClusterSlots(self._nodes)

    def _nodes(self) -> list[Node]:
        return [
            Node(one["NodeID"], one["NodeManagerAddress"], int(one["Resources"].get("CPU", 0)))
            for one in self._ray.nodes()
            if one["Alive"] and one["Resources"].get("CPU", 0) >= 1
        ]

    def level(self, required: Level | None = None, forced: Level | None = None) -> Level:
        """The forced level, or the strongest that every node offers. Nodes without the forced
        level, or weaker than required, do not grade."""
        refuse_contradiction(required, forced)
        ask = self._ray.remote(probe)
        offers: list[Level] = []
        for node in self._nodes():
            try:
                offered = self._answer(ask, node, 0)
            except LostError:
                self.slots.rest(node)
                continue
            if forced is not None and forced not in offered:
                self.slots.refuse(node, f"does not offer isolation {forced!r}")
            elif required is not None and is_weaker(offered[0], required):
                self.slots.refuse(
                    node, f"offers isolation {offered[0]!r}, {required!r} was required"
                )
            else:
                offers.append(forced or offered[0])
        if not offers:
            wanted = forced or required
            detail = f" with isolation {wanted!r}" if wanted else ""
            raise MissingError(f"the cluster has no node{detail} that could grade")
        return min(offers, key=LEVELS.index)

    @contextmanager
    def slot(self, *, alone: bool) -> Iterator["ClusterSlot"]:
        slot = ClusterSlot(self, alone)
        try:
            yield slot
        finally:
            slot.leave()

    def grade(self, node: Node, request: GradeRequest, challenge: Challenge, cpus: int) -> Bundle:
        verdict, text = self._answer(
            self._task, node, cpus, request, challenge.package, challenge.digest
        )
        if verdict == "refused":
            raise RefusedError(text)
        return Bundle.model_validate_json(text)

    def _answer(self, task: Any, node: Node, cpus: int, *arguments: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        on_node = NodeAffinitySchedulingStrategy(node.id, soft=False)
        options = {"num_cpus": cpus, "max_retries": 0, "scheduling_strategy": on_node}
        asked = task.options(**options).remote(*arguments)
        self._running.add(asked)
        try:
            return self._ray.get(asked)
        except TaskCancelledError:
            raise InterruptedRunError from None
        except RayTaskError as error:
            raise ArenaError(f"grading on {node.name} failed: {_lines(error)[-1]}") from None
        except RayError as error:
            raise LostError(f"{node.name} was lost: {type(error).__name__}") from None
        finally:
            self._running.discard(asked)

    def close(self) -> None:
        """Cancels what is still running: its workers end, and so do their sandboxes."""
        self.slots.close()
        for asked in list(self._running):
            self._ray.cancel(asked, force=True)
        if not self._running:
            self._ray.shutdown()


class ClusterSlot:
    def __init__(self, cluster: Cluster, alone: bool) -> None:
        self._cluster, self._alone = cluster, alone
        self.node = cluster.slots.take(alone=alone)
        self._taken = True

    def leave(self) -> None:
        if self._taken:
            self._cluster.slots.leave(self.node, alone=self._alone)
        self._taken = False

    def grade(self, request: GradeRequest, challenge: Challenge, on_step: OnStep) -> Bundle:
        """Repeats a grade only after a loss, never because of its verdict."""
        losses: list[str] = []
        while len(losses) < MOST_LOSSES:
            on_step(f"on {self.node.name}")
            cpus = self.node.cpus if self._alone else 1
            try:
                return self._cluster.grade(self.node, request, challenge, cpus)
            except LostError as error:
                losses.append(str(error))
                self._cluster.slots.rest(self.node)
            except RefusedError as error:
                self._cluster.slots.refuse(self.node, str(error))
            self._move()
        reason = f"{len(losses)} times, {losses[-1]}"
        bundle = grade(replace(request, trouble=reason), challenge)
        return bundle.model_copy(update={"cell": bundle.cell.model_copy(update={"reason": reason})})

    def _move(self) -> None:
        # Leave first: on the only node, the slot taken next may be this one.
        self.leave()
        self.node = self._cluster.slots.take(alone=self._alone)
        self._taken = True


# What runs on a node


def grade_on_node(request: GradeRequest, package: str, digest: str) -> tuple[str, str]:
    """`graded` with the bundle's text, or `refused` with the reason why this machine cannot."""
    try:
        challenge = _checked_challenge(package, digest, request.level)
    except ArenaError as error:
        return "refused", str(error)
    return "graded", canonical(grade(request, challenge))


@cache
def _checked_challenge(package: str, digest: str, level: Level) -> Challenge:
    """The challenge, after this machine has passed its check."""
    challenge = find_challenge(package, digest)
    check_machine(challenge, level)
    return challenge


def find_challenge(package: str, digest: str) -> Challenge:
    """The challenge that this machine has installed; refused when its digest differs."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ArenaError(f"the challenge {package} cannot be imported: {error}") from None
    challenge = Challenge(Path(str(module.__file__)).parent, package)
    if challenge.digest != digest:
        raise ArenaError(f"another version of the challenge {challenge.id} is installed")
    return challenge


# Ray


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise MissingError("a Ray cluster needs ray: pip install 'trapline[ray]'") from None
    _check_port(address, ray)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise MissingError(f"no Ray cluster answers at {address!r}: {_lines(error)[0]}") from None
    return ray


def _check_port(address: str, ray: Any) -> None:
    """Fails at once where no server listens; Ray itself waits for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    # Ray resolves loopback to this machine's address in the cluster.
    local = host in ("localhost", "127.0.0.1") and not address.startswith("ray://")
    where = ray.util.get_node_ip_address() if local else host.strip("[]")
    try:
        socket.create_connection((where, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingError(f"no Ray cluster answers at {address!r}: {reason}") from None


def _lines(error: Exception) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
