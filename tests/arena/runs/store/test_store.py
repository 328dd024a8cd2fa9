"""A run that is kept, in a folder and on a server: nothing lost, nothing doubled, nothing believed
that was changed."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.runs.store import Store, last_run, read_bundle

KEY = ("a", "sorting", "cpu", 1)


@pytest.fixture
def store(place):
    store = Store(place)
    yield store
    store.close()


@pytest.fixture
def other(place, store):
    """The same run, opened by somebody else."""
    other = Store(place)
    yield other
    other.close()


def test_saved_cell_can_be_read(store, other, make_bundle):
    saved = store.save(make_bundle())
    assert other.cells() == [saved]
    assert other.newest(saved.key) == saved
    assert other.newest(("b", "sorting", "cpu", 1)) is None
    assert other.bundle(saved.bundle).files == {"solution.py": "x = 'ü\0'\n"}


def test_second_grade_replaces_the_cell_and_keeps_the_history(store, make_bundle):
    store.save(make_bundle(score=50.0))
    store.save(make_bundle(score=60.0))
    assert [cell.score for cell in store.cells()] == [60.0]
    assert [cell.score for cell in store.history()] == [50.0, 60.0]


def test_evidence_is_found_by_how_its_digest_begins(store, make_bundle):
    saved = [store.save(make_bundle(str(n))).bundle for n in range(20)]
    assert store.find_bundle(saved[3][:12]) == saved[3]
    assert store.find_bundle(f"{saved[3]}.json") == saved[3]
    with pytest.raises(UsageError, match="20 bundles"):
        store.find_bundle("")
    with pytest.raises(UsageError, match="no bundle"):
        store.find_bundle("%")


def test_changed_bundle_is_refused_and_repaired(store, raw, make_bundle):
    saved = store.save(make_bundle())
    if store.folder is None:
        raw(store, "UPDATE @bundles SET content = replace(content, '90.0', '91.0')")
    else:
        path = store.folder / "bundles" / f"{saved.bundle}.json"
        path.write_text(path.read_text().replace("90.0", "91.0"))
    with pytest.raises(ArenaError, match="was changed"):
        store.bundle(saved.bundle)
    assert not store.has_bundle(saved.bundle)
    store.save(make_bundle())
    assert store.has_bundle(saved.bundle)
    assert not store.has_bundle("0" * 64)
    with pytest.raises(UsageError, match="no bundle"):
        store.bundle("0" * 64)


def test_every_byte_of_a_bundle_counts(tmp_path, make_bundle):
    store = Store(tmp_path / "run")
    path = store.folder / "bundles" / f"{store.save(make_bundle()).bundle}.json"
    store.close()
    text = path.read_text()
    for at in (0, len(text) // 2, len(text) - 1):
        path.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        with pytest.raises(ArenaError, match="was changed"):
            read_bundle(path)


def test_damaged_record_is_left_out_and_counted(store, raw, make_bundle):
    store.save(make_bundle("a", score=10.0))
    store.save(make_bundle("b", score=20.0))
    assert store.damaged() == 0
    raw(store, "UPDATE @cells SET record = replace(record, '20.0', '99.0')")
    assert [cell.entrant for cell in store.cells()] == ["a"]
    assert store.newest(("b", "sorting", "cpu", 1)) is None
    assert store.damaged() == 1


def test_claims_are_exclusive_between_living_graders(store, other, make_bundle):
    store.plan([KEY])
    with store.grading(), other.grading():
        assert store.claim(KEY)
        assert not other.claim(KEY)
        assert list(other.waiting().values()) == ["running"]
    with other.grading():
        assert list(other.waiting().values()) == ["waiting"]
        assert other.claim(KEY)
        assert other.is_planned(KEY)
        other.save(make_bundle())
        assert not other.claim(KEY)
    assert other.waiting() == {}
    assert not other.is_planned(KEY)


def test_cell_taken_over_by_another_grader_is_not_saved_twice(store, other, raw, make_bundle):
    """A grader that was cut off from the store, taken for dead, and comes back."""
    store.plan([KEY])
    with store.grading():
        assert store.claim(KEY)
        raw(store, "UPDATE @plan SET grader = 'gone'")
        with other.grading():
            assert other.claim(KEY)
            assert store.save(make_bundle(score=1.0)) is None
            assert other.save(make_bundle(score=2.0)) is not None
            assert store.save(make_bundle(score=1.0)) is None
    assert [cell.score for cell in store.history()] == [2.0]


def test_claim_needs_a_live_grader(store):
    store.plan([KEY])
    with pytest.raises(ArenaError, match="no longer knows this grader"):
        store.claim(KEY)


def test_many_claim_at_once_and_each_cell_has_one_grader(place, store):
    keys = [(f"e{n}", "sorting", "cpu", 1) for n in range(12)]
    store.plan(keys)
    stores = [Store(place) for _ in range(4)]

    def claim_all(one):
        return [key for key in keys if one.claim(key)]

    from contextlib import ExitStack

    with ExitStack() as graders, ThreadPoolExecutor(4) as pool:
        for one in stores:
            graders.enter_context(one.grading())
        claimed = [key for found in pool.map(claim_all, stores) for key in found]
    assert sorted(claimed) == sorted(keys)
    for one in stores:
        one.close()


def test_many_threads_write_at_once(store, make_bundle):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.save(make_bundle(f"e{i}")), range(24)))
    assert len(store.cells()) == 24


def test_many_plan_the_same_at_once(store, other):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: one.plan([KEY, ("b", *KEY[1:])]), [store, other] * 8))
    assert [planned.entrant for planned in store.waiting()] == ["a", "b"]
    store.withdraw(KEY)
    assert [planned.entrant for planned in store.waiting()] == ["b"]


def test_facts_about_the_run(store, other):
    store.set_meta(seed=3, rig={"a": "b"})
    store.set_meta(seed=4)
    assert other.meta() == {"seed": 4, "rig": {"a": "b"}}


def test_all_graders_agree_on_the_first_value(store, other):
    with ThreadPoolExecutor(8) as pool:
        agreed = list(pool.map(lambda n: (store, other)[n % 2].agree("seed", n), range(16)))
    assert len(set(agreed)) == 1


def test_run_is_opened_by_many_at_the_same_moment(place):
    with ThreadPoolExecutor(6) as pool:
        for store in pool.map(lambda _: Store(place), range(6)):
            assert store.cells() == []
            store.close()


def test_empty_place_is_not_a_run(place):
    with pytest.raises(UsageError, match="holds no run"):
        Store(place, create=False)


def test_folder_without_a_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        Store(tmp_path / "file")
    with pytest.raises(UsageError, match="no run in"):
        last_run(tmp_path)


def test_folder_may_be_called_anything(tmp_path, make_bundle):
    for name in ("a?b=c", "a", "100 %41 #1"):
        with closing(Store(tmp_path / name)) as store:
            store.save(make_bundle(entrant=name))
        assert (tmp_path / name / "run.sqlite").is_file()
        with closing(Store(tmp_path / name, create=False)) as store:
            assert [cell.entrant for cell in store.cells()] == [name]


def test_run_that_is_being_written_is_the_last_one(tmp_path, make_bundle):
    with closing(Store(tmp_path / "going")) as going:
        going.save(make_bundle())
        Store(tmp_path / "finished").close()
        for name, stamp in (("going", 1_700_000_000), ("finished", 1_700_000_100)):
            os.utime(tmp_path / name / "run.sqlite", (stamp, stamp))
        going.save(make_bundle(entrant="b"))
        assert last_run(tmp_path) == tmp_path / "going"


def test_run_that_is_only_read_is_not_the_last_one(tmp_path, make_bundle):
    for name, stamp in (("old", 1_700_000_000), ("new", 1_700_000_100)):
        with closing(Store(tmp_path / name)) as store:
            store.save(make_bundle())
        os.utime(tmp_path / name / "run.sqlite", (stamp, stamp))
    with closing(Store(tmp_path / "old", create=False)) as store:
        store.cells()
        assert last_run(tmp_path) == tmp_path / "new"


def test_last_run_is_the_one_written_to_last(tmp_path):
    for age, name in ((100, "old"), (0, "new")):
        Store(tmp_path / name).close()
        stamp = 1_800_000_000 - age
        os.utime(tmp_path / name / "run.sqlite", (stamp, stamp))
    assert last_run(tmp_path) == Path(tmp_path / "new")
