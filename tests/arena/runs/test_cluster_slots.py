"""Room on a cluster: who takes times is alone, who lost a node sits elsewhere."""

import threading

import pytest

from trapline.arena.errors import ArenaError, InterruptedRunError
from trapline.arena.judge.grade import Job, grade
from trapline.arena.judge.intake import take_in
from trapline.arena.runs import cluster_slots as module
from trapline.arena.runs.cluster import MOST_LOSSES, ClusterSeat, LostError, RefusedError
from trapline.arena.runs.cluster_slots import Node, Seats
from trapline.arena.runs.field import Entry
from trapline.arena.runs.grade_request import Shipment, find_challenge

BIG, SMALL = Node("a", "big", 4), Node("b", "small", 2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Nothing of this needs real waiting."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "REST_SECONDS", 0.0)
    monkeypatch.setattr(module, "NO_NODE_SECONDS", 0.05)


def test_cells_spread_and_a_node_is_filled_to_its_cpus():
    seats = Seats(lambda: [BIG, SMALL])
    taken = [seats.take(alone=False).name for _ in range(6)]
    assert taken[:2] == ["big", "small"]
    assert sorted(taken) == ["big"] * 4 + ["small"] * 2


def test_who_takes_times_has_a_node_for_itself():
    seats = Seats(lambda: [BIG, SMALL])
    assert seats.take(alone=False) == BIG
    assert seats.take(alone=True) == SMALL
    got = []
    waiting = threading.Thread(target=lambda: got.append(seats.take(alone=True)))
    waiting.start()
    waiting.join(0.2)
    assert got == []
    seats.leave(BIG, alone=False)
    waiting.join(60)
    assert got == [BIG]


def test_a_node_that_joins_is_used():
    nodes = [SMALL]
    seats = Seats(lambda: list(nodes))
    assert seats.take(alone=True) == SMALL
    nodes.append(BIG)
    assert seats.take(alone=True) == BIG


def test_where_nobody_can_judge_the_reason_is_said():
    seats = Seats(lambda: [BIG])
    seats.refuse(BIG, "zeros pass")
    with pytest.raises(ArenaError, match="big: zeros pass"):
        seats.take(alone=False)


def test_a_cluster_without_nodes_is_given_up():
    with pytest.raises(ArenaError, match="no node left"):
        Seats(list).take(alone=False)


def test_who_waits_is_let_go_when_the_run_ends():
    seats = Seats(lambda: [BIG])
    seats.take(alone=True)
    caught = []

    def wait():
        with pytest.raises(InterruptedRunError):
            seats.take(alone=True)
        caught.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    seats.close()
    waiting.join(60)
    assert caught == [True]


class Unlucky:
    """A cluster on which something happens before the last answer."""

    def __init__(self, happenings, answer, nodes=(BIG, SMALL)):
        self.seats = Seats(lambda: list(nodes))
        self.happenings, self.answer = list(happenings), answer
        self.asked = []

    def grade(self, node, shipment, cpus):
        self.asked.append((node.name, cpus))
        if self.happenings:
            raise self.happenings.pop(0)
        return self.answer


@pytest.fixture
def shipment(sorting, level, submission_folder):
    folder = submission_folder("def sort_rows(:\n")
    entry = Entry("somebody", "sorting", 1, folder)
    return Shipment(entry, "sorting", sorting.digest, level, 7, False, take_in(folder))


def test_a_lost_cell_is_graded_elsewhere_and_a_bad_one_only_once(shipment, sorting):
    bundle = grade(Job(shipment.entry, sorting, shipment.level, 7))
    assert bundle.cell.state == "fail"
    cluster = Unlucky([LostError("gone"), RefusedError("cannot judge")], bundle)
    steps = []
    assert ClusterSeat(cluster, True).grade(shipment, sorting, steps.append) == bundle
    assert len(cluster.asked) == 3
    assert set(cluster.asked) <= {("big", 4), ("small", 2)}
    assert len(set(steps)) > 1


def test_a_cell_that_was_alone_on_the_only_node_is_graded_there_again(shipment, sorting):
    cluster = Unlucky([LostError("its worker was killed")], "a verdict", nodes=[BIG])
    got = []
    with_seat = threading.Thread(
        target=lambda: got.append(ClusterSeat(cluster, True).grade(shipment, sorting, print)),
        daemon=True,
    )
    with_seat.start()
    with_seat.join(20)
    cluster.seats.close()
    assert got == ["a verdict"]


def test_a_seat_that_was_lost_for_good_is_left_once(shipment, sorting):
    cluster = Unlucky([RefusedError("cannot judge")], None, nodes=[BIG])
    seat = ClusterSeat(cluster, True)
    with pytest.raises(ArenaError, match="cannot judge"):
        seat.grade(shipment, sorting, print)
    seat.leave()
    assert cluster.seats._taken == {BIG.id: 0}


def test_a_cell_that_is_lost_again_and_again_is_not_measured(shipment, sorting):
    cluster = Unlucky([LostError("big was lost")] * MOST_LOSSES, None)
    cell = ClusterSeat(cluster, False).grade(shipment, sorting, lambda step: None).cell
    assert (cell.state, cell.score) == ("infra_error", None)
    assert cell.reason == f"{MOST_LOSSES} times, big was lost"
    assert cell.submission_digest == shipment.intake.digest


def test_a_node_with_another_challenge_does_not_grade(sorting):
    assert find_challenge("sorting", sorting.digest).id == "sorting"
    with pytest.raises(ArenaError, match="another version of the challenge sorting"):
        find_challenge("sorting", "0")
    with pytest.raises(ArenaError, match="cannot be imported"):
        find_challenge("no_such_challenge", "0")


def test_a_shipment_is_what_a_wire_can_carry(shipment):
    import pickle

    assert pickle.loads(pickle.dumps(shipment)) == shipment
