"""Room on a cluster: who takes times is alone, who lost a node sits elsewhere."""

import threading

import pytest

from trapline.arena.errors import ArenaError, InterruptedRunError
from trapline.arena.judge.grade import grade
from trapline.arena.judge.intake import take_in
from trapline.arena.judge.request import GradeRequest
from trapline.arena.runs import cluster_slots as module
from trapline.arena.runs.cluster import (
    MOST_LOSSES,
    ClusterSlot,
    LostError,
    RefusedError,
    find_challenge,
)
from trapline.arena.runs.cluster_slots import ClusterSlots, Node

BIG, SMALL = Node("a", "big", 4), Node("b", "small", 2)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Nothing of this needs real waiting."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(module, "REST_SECONDS", 0.0)
    monkeypatch.setattr(module, "NO_NODE_SECONDS", 0.05)


def test_cells_spread_and_a_node_is_filled_to_its_cpus():
    slots = ClusterSlots(lambda: [BIG, SMALL])
    taken = [slots.take(alone=False).name for _ in range(6)]
    assert taken[:2] == ["big", "small"]
    assert sorted(taken) == ["big"] * 4 + ["small"] * 2


def test_timed_cell_has_a_node_for_itself():
    slots = ClusterSlots(lambda: [BIG, SMALL])
    assert slots.take(alone=False) == BIG
    assert slots.take(alone=True) == SMALL
    got = []
    waiting = threading.Thread(target=lambda: got.append(slots.take(alone=True)))
    waiting.start()
    waiting.join(0.2)
    assert got == []
    slots.leave(BIG, alone=False)
    waiting.join(60)
    assert got == [BIG]


def test_node_that_joins_is_used():
    nodes = [SMALL]
    slots = ClusterSlots(lambda: list(nodes))
    assert slots.take(alone=True) == SMALL
    nodes.append(BIG)
    assert slots.take(alone=True) == BIG


def test_reason_is_given_when_no_node_can_grade():
    slots = ClusterSlots(lambda: [BIG])
    slots.refuse(BIG, "zeros pass")
    with pytest.raises(ArenaError, match="big: zeros pass"):
        slots.take(alone=False)


def test_cluster_without_nodes_is_given_up():
    with pytest.raises(ArenaError, match="no node left"):
        ClusterSlots(list).take(alone=False)


def test_waiting_threads_end_with_the_run():
    slots = ClusterSlots(lambda: [BIG])
    slots.take(alone=True)
    caught = []

    def wait():
        with pytest.raises(InterruptedRunError):
            slots.take(alone=True)
        caught.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    slots.close()
    waiting.join(60)
    assert caught == [True]


class Unlucky:
    """A cluster on which something happens before the last answer."""

    def __init__(self, happenings, answer, nodes=(BIG, SMALL)):
        self.slots = ClusterSlots(lambda: list(nodes))
        self.happenings, self.answer = list(happenings), answer
        self.asked = []

    def grade(self, node, request, challenge, cpus):
        self.asked.append((node.name, cpus))
        if self.happenings:
            raise self.happenings.pop(0)
        return self.answer


@pytest.fixture
def grade_request(sorting, level, submission_folder):
    folder = submission_folder("def sort_rows(:\n")
    intake = take_in(folder)
    return GradeRequest("somebody", "sorting", 1, folder, level=level, seed=7, intake=intake)


def test_lost_cell_is_graded_elsewhere_and_a_bad_one_only_once(grade_request, sorting):
    bundle = grade(grade_request, sorting)
    assert bundle.cell.state == "fail"
    cluster = Unlucky([LostError("gone"), RefusedError("cannot judge")], bundle)
    steps = []
    assert ClusterSlot(cluster, True).grade(grade_request, sorting, steps.append) == bundle
    assert len(cluster.asked) == 3
    assert set(cluster.asked) <= {("big", 4), ("small", 2)}
    assert len(set(steps)) > 1


def test_cell_that_was_alone_on_the_only_node_is_graded_there_again(grade_request, sorting):
    cluster = Unlucky([LostError("its worker was killed")], "a verdict", nodes=[BIG])
    got = []
    with_slot = threading.Thread(
        target=lambda: got.append(ClusterSlot(cluster, True).grade(grade_request, sorting, print)),
        daemon=True,
    )
    with_slot.start()
    with_slot.join(20)
    cluster.slots.close()
    assert got == ["a verdict"]


def test_lost_slot_is_released_once(grade_request, sorting):
    cluster = Unlucky([RefusedError("cannot judge")], None, nodes=[BIG])
    slot = ClusterSlot(cluster, True)
    with pytest.raises(ArenaError, match="cannot judge"):
        slot.grade(grade_request, sorting, print)
    slot.leave()
    assert cluster.slots._taken == {BIG.id: 0}


def test_repeatedly_lost_cell_is_not_measured(grade_request, sorting):
    cluster = Unlucky([LostError("big was lost")] * MOST_LOSSES, None)
    cell = ClusterSlot(cluster, False).grade(grade_request, sorting, lambda step: None).cell
    assert (cell.state, cell.score) == ("infra_error", None)
    assert cell.reason == f"{MOST_LOSSES} times, big was lost"
    assert cell.submission_digest == grade_request.intake.digest


def test_node_with_another_challenge_does_not_grade(sorting):
    assert find_challenge("sorting", sorting.digest).id == "sorting"
    with pytest.raises(ArenaError, match="another version of the challenge sorting"):
        find_challenge("sorting", "0")
    with pytest.raises(ArenaError, match="cannot be imported"):
        find_challenge("no_such_challenge", "0")


def test_grade_request_can_be_pickled(grade_request):
    import pickle

    assert pickle.loads(pickle.dumps(grade_request)) == grade_request
