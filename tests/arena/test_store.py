"""A run on disk: nothing lost, nothing doubled, nothing believed that was changed."""

import sqlite3
from datetime import UTC, datetime

import pytest

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.record import Bundle, Cell
from trapline.arena.store import Store, last_run, read_bundle


def bundle(entrant="a", challenge="sorting", score=90.0, **changes):
    cell = Cell(
        entrant=entrant,
        challenge=challenge,
        state="pass",
        score=score,
        letter="A-",
        reason="",
        isolation="process",
        dimensions={},
        cases=[],
        traps=[],
        submission_digest="s",
        challenge_digest="c",
        seed=1,
        versions={},
        started=datetime(2026, 1, 1, tzinfo=UTC),
        seconds=1.0,
        **changes,
    )
    return Bundle(cell=cell, files={"solution.py": "x = 'ü'\n"})


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "run")
    yield store
    store.close()


def test_what_was_saved_is_there_again(store):
    saved = store.save(bundle())
    again = Store(store.folder)
    assert again.cells() == [saved]
    assert again.bundle(saved.bundle).files == {"solution.py": "x = 'ü'\n"}
    again.close()


def test_a_second_grade_replaces_the_cell_and_keeps_the_history(store):
    store.save(bundle(score=50.0))
    store.save(bundle(score=60.0))
    assert [cell.score for cell in store.cells()] == [60.0]
    assert [cell.score for cell in store.history()] == [50.0, 60.0]


def test_a_changed_bundle_is_refused(store):
    saved = store.save(bundle())
    path = store.folder / "bundles" / f"{saved.bundle}.json"
    text = path.read_text()
    for at in (0, len(text) // 2, len(text) - 1):
        path.write_text(text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :])
        with pytest.raises(ArenaError, match="was changed"):
            read_bundle(path)
        assert not store.has_bundle(saved.bundle)
    path.write_text(text)
    assert store.has_bundle(saved.bundle)


def test_a_damaged_record_is_not_believed(store):
    store.save(bundle("a", score=10.0))
    store.save(bundle("b", score=20.0))
    store.close()
    with sqlite3.connect(store.folder / "run.sqlite") as raw:
        raw.execute("UPDATE cells SET record = replace(record, '20.0', '99.0')")
    assert [cell.entrant for cell in Store(store.folder).cells()] == ["a"]


def test_claims_are_exclusive_between_living_graders(store):
    key = ("a", "sorting", "cpu", 1)
    other = Store(store.folder)
    store.plan([key])
    with store.grading(), other.grading():
        assert store.claim(key)
        assert not other.claim(key)
        assert [planned.status for planned in other.waiting()] == ["running"]
    with other.grading():
        assert [planned.status for planned in other.waiting()] == ["waiting"]
        assert other.claim(key)
        other.save(bundle())
        assert not other.claim(key)
    assert other.waiting() == []
    other.close()


def test_many_threads_write_at_once(store):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.save(bundle(f"e{i}")), range(24)))
    assert len(store.cells()) == 24


def test_facts_about_the_run(store):
    store.set_meta(seed=3, rig={"a": "b"})
    store.set_meta(seed=4)
    assert store.meta() == {"seed": 4, "rig": {"a": "b"}}


def test_what_is_no_run_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        Store(tmp_path / "file")
    with pytest.raises(UsageError, match="holds no run"):
        Store(tmp_path / "nowhere", create=False)
    with pytest.raises(UsageError, match="no run in"):
        last_run(tmp_path)


def test_the_last_run_is_the_one_written_to_last(tmp_path):
    import os

    for age, name in ((100, "old"), (0, "new")):
        Store(tmp_path / name).close()
        stamp = 1_800_000_000 - age
        os.utime(tmp_path / name / "run.sqlite", (stamp, stamp))
    assert last_run(tmp_path).name == "new"
