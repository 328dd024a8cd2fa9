"""Completion counters: launches that may run at the same time get different ones."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.paged import triton as paged_triton  # noqa: E402


@pytest.fixture
def counters(monkeypatch):
    monkeypatch.setattr(paged_triton, "RING_SIZE", 10)
    monkeypatch.setattr(paged_triton, "KEPT_SIZE", 10)
    return paged_triton.CompletionCounters(torch.device("cpu"))


def places(*taken):
    return [one.storage_offset() for one in taken]


def test_launches_take_turns(counters):
    taken = [counters.take(4, keep=False) for _ in range(4)]
    assert places(*taken) == [0, 4, 0, 4]
    assert all(len(one) == 4 and not one.any() for one in taken)
    assert counters.take(11, keep=False) is None


def test_counters_of_a_graph_are_not_reused(counters):
    first, second = (counters.take(4, keep=True) for _ in range(2))
    assert places(first, second) == [0, 4]
    assert counters.take(4, keep=True) is None
    assert counters.take(4, keep=True) is None
    assert first.untyped_storage().data_ptr() != counters.take(4, keep=False).data_ptr()


def test_counters_are_made_once_for_a_device(monkeypatch):
    monkeypatch.setattr(paged_triton, "RING_SIZE", 10)
    monkeypatch.setattr(paged_triton, "_made", {})
    like = torch.zeros(1)
    one, other, long = (paged_triton.completion_counters(count, like) for count in (3, 3, 20))
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert places(one, other) == [0, 3]
    assert len(long) == 20
    assert not long.any()


def test_threads_do_not_get_the_same_counters(monkeypatch):
    """Each counter is handed out once before the ring comes round."""
    monkeypatch.setattr(paged_triton, "RING_SIZE", 4000)
    shared = paged_triton.CompletionCounters(torch.device("cpu"))
    with ThreadPoolExecutor(4) as pool:
        taken = pool.map(lambda _: shared.take(2, keep=False), range(2000))
    assert sorted(places(*taken)) == list(range(0, 4000, 2))
