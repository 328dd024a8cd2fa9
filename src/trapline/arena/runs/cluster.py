"""Grades on a Ray cluster: each cell where there is room, again elsewhere when a node dies.

Ray carries the cell to a node and the verdict back; which node is decided here. A cell that takes
times is given all CPUs of a node, so that no other task of anybody's runs beside it; that needs no
resources that a cluster would have to be started with. The submission travels with the task, the
challenges come from the package installed on the node, and only the driver knows the store.
"""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError, InterruptedRunError, MissingError
from trapline.arena.judge.grade import OnStep, grade_intake
from trapline.arena.process.sandbox import probe
from trapline.arena.record import LEVELS, Bundle, Level
from trapline.arena.runs.cluster_slots import Node, Seats
from trapline.arena.runs.grade_request import Shipment, find_challenge
from trapline.arena.runs.run import examine_rig
from trapline.arena.runs.store import canonical

#: Threads that wait for a seat cost nothing; nodes may join while a run goes on.
MOST_CELLS_AT_ONCE = 256
#: A cell that loses its worker this often is not graded: it may be what kills them.
MOST_LOSSES = 4
KNOCK_SECONDS = 10.0


class LostError(ArenaError):
    """A node or a worker process ended under a cell; nothing is known of the submission."""


class RefusedError(ArenaError):
    """A node that cannot judge."""


class Cluster:
    """An executor that grades on the nodes of a Ray cluster."""

    is_here = False

    def __init__(self, address: str, workers: int | None = None) -> None:
        self._ray = _connect(address)
        self._task = self._ray.remote(grade_shipment)
        self._at_work: set[Any] = set()
        self.width = workers or MOST_CELLS_AT_ONCE
        self.seats = Seats(self._nodes)

    def _nodes(self) -> list[Node]:
        """Nodes without CPUs are there for other things."""
        return [
            Node(one["NodeID"], one["NodeManagerAddress"], int(one["Resources"].get("CPU", 0)))
            for one in self._ray.nodes()
            if one["Alive"] and one["Resources"].get("CPU", 0) >= 1
        ]

    def level(self, required: Level | None = None) -> Level:
        """The strongest level that every node offers; nodes weaker than required do not grade."""
        ask = self._ray.remote(best_level)
        offers: list[Level] = []
        for node in self._nodes():
            try:
                best = self._answer(ask, node, 0)
            except LostError:
                self.seats.rest(node)
                continue
            if required is not None and LEVELS.index(best) < LEVELS.index(required):
                self.seats.refuse(node, f"offers isolation {best!r}, {required!r} was required")
            else:
                offers.append(best)
        if not offers:
            wanted = f" with isolation {required!r}" if required else ""
            raise MissingError(f"the cluster has no node{wanted} that could grade")
        return min(offers, key=LEVELS.index)

    @contextmanager
    def seat(self, *, alone: bool) -> Iterator["ClusterSeat"]:
        seat = ClusterSeat(self, alone)
        try:
            yield seat
        finally:
            seat.leave()

    def grade(self, node: Node, shipment: Shipment, cpus: int) -> Bundle:
        """Grades on this node, now."""
        verdict, text = self._answer(self._task, node, cpus, shipment)
        if verdict == "refused":
            raise RefusedError(text)
        return Bundle.model_validate_json(text)

    def _answer(self, task: Any, node: Node, cpus: int, *arguments: Any) -> Any:
        from ray.exceptions import RayError, RayTaskError, TaskCancelledError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(node.id, soft=False)
        options = {"num_cpus": cpus, "max_retries": 0, "scheduling_strategy": here}
        asked = task.options(**options).remote(*arguments)
        self._at_work.add(asked)
        try:
            return self._ray.get(asked)
        except TaskCancelledError:
            raise InterruptedRunError("interrupted") from None
        except RayTaskError as error:
            raise ArenaError(f"grading on {node.name} failed: {_last_line(error)}") from None
        except RayError as error:
            raise LostError(f"{node.name} was lost: {type(error).__name__}") from None
        finally:
            self._at_work.discard(asked)

    def close(self) -> None:
        """Nobody waits for what is still at work: its workers end, and so do their sandboxes."""
        self.seats.close()
        for asked in list(self._at_work):
            self._ray.cancel(asked, force=True)
        if not self._at_work:
            self._ray.shutdown()


class ClusterSeat:
    """A place on a node; on another one after a loss."""

    def __init__(self, cluster: Cluster, alone: bool) -> None:
        self._cluster, self._alone = cluster, alone
        self.node = cluster.seats.take(alone=alone)
        self._seated = True

    def leave(self) -> None:
        if self._seated:
            self._cluster.seats.leave(self.node, alone=self._alone)
        self._seated = False

    def grade(self, shipment: Shipment, challenge: Challenge, on_step: OnStep) -> Bundle:
        """A verdict, however bad, is never asked for twice; only a loss is made good."""
        losses: list[str] = []
        while len(losses) < MOST_LOSSES:
            on_step(f"on {self.node.name}")
            cpus = self.node.cpus if self._alone else 1
            try:
                return self._cluster.grade(self.node, shipment, cpus)
            except LostError as error:
                losses.append(str(error))
                self._cluster.seats.rest(self.node)
            except RefusedError as error:
                self._cluster.seats.refuse(self.node, str(error))
            self._move()
        return _not_measured(shipment, challenge, f"{len(losses)} times, {losses[-1]}")

    def _move(self) -> None:
        # First up, then down: on the only node nobody else's place will ever become free.
        self.leave()
        self.node = self._cluster.seats.take(alone=self._alone)
        self._seated = True


def _not_measured(shipment: Shipment, challenge: Challenge, reason: str) -> Bundle:
    """Nothing is known of the submission, and the cell says why."""
    entry = replace(shipment.entry, trouble=reason)
    bundle = grade_intake(replace(shipment, entry=entry).job(challenge), shipment.intake)
    return bundle.model_copy(update={"cell": bundle.cell.model_copy(update={"reason": reason})})


# What happens on a node


def best_level() -> Level:
    """The strongest level of the machine that this runs on."""
    return probe()[0]


def grade_shipment(shipment: Shipment) -> tuple[str, str]:
    """`graded` with the bundle's text, or `refused` with the reason why this machine cannot."""
    try:
        challenge = _admitted(shipment.package, shipment.challenge_digest, shipment.level)
    except ArenaError as error:
        return "refused", str(error)
    return "graded", canonical(grade_intake(shipment.job(challenge), shipment.intake))


@cache
def _admitted(package: str, digest: str, level: Level) -> Challenge:
    """The challenge, once this machine has shown that it can tell right from wrong on it."""
    challenge = find_challenge(package, digest)
    examine_rig(challenge, level)
    return challenge


# Ray


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise MissingError("a Ray cluster needs ray: pip install 'trapline[ray]'") from None
    _knock(address, ray)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise MissingError(f"no Ray cluster answers at {address!r}: {_first_line(error)}") from None
    return ray


def _knock(address: str, ray: Any) -> None:
    """Ray itself would wait for minutes where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    # Ray takes loopback for this machine's address in the cluster.
    local = host in ("localhost", "127.0.0.1") and not address.startswith("ray://")
    where = ray.util.get_node_ip_address() if local else host.strip("[]")
    try:
        socket.create_connection((where, int(port)), KNOCK_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingError(f"no Ray cluster answers at {address!r}: {reason}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
