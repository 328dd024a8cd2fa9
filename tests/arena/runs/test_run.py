"""A run as a whole: what is done is not done again, and a machine that cannot judge does not."""

import pytest

from trapline.arena.errors import ArenaError, Violation
from trapline.arena.judge.traps import Case
from trapline.arena.runs import field, run
from trapline.arena.runs.run import Options, grade_field, open_run


@pytest.fixture
def entries(known_sorting, tmp_path, monkeypatch):
    """One entrant, right, without tests of its own."""
    for module in (field, run):
        monkeypatch.setattr(module, "load", lambda name: known_sorting)
    monkeypatch.setattr(field, "load_all", lambda: {"sorting": known_sorting})
    folder = tmp_path / "field" / "somebody" / "sorting"
    folder.mkdir(parents=True)
    (folder / "solution.py").write_text(known_sorting.solution_files()["solution.py"])
    return field.find_entries(tmp_path / "field", [])


@pytest.fixture
def options(level):
    return Options(level, workers=1)


def grade_once(entries, folder, options):
    with open_run(folder) as store:
        return [cell.entrant for cell in grade_field(entries, store, options)]


def test_up_to_date_cell_is_not_graded_again(entries, tmp_path, options):
    assert grade_once(entries, tmp_path / "run", options) == ["somebody"]
    assert grade_once(entries, tmp_path / "run", options) == []
    with (entries[0].folder / "solution.py").open("a") as file:
        file.write("\n# changed\n")
    assert grade_once(entries, tmp_path / "run", options) == ["somebody"]
    with open_run(tmp_path / "run") as store:
        assert len(store.history()) == 2
        assert len(store.cells()) == 1


def unfair(submission, rng):
    raise Violation("nothing is right on this machine")


@pytest.mark.parametrize(
    ("cases", "sentence"),
    [
        ([Case("unfair", unfair)], "a right answer was called wrong"),
        ([Case("blind", lambda submission, rng: None)], "a worthless answer passes every case"),
    ],
)
def test_machine_that_fails_its_check_does_not_grade(
    entries, tmp_path, options, monkeypatch, known_sorting, cases, sentence
):
    monkeypatch.setitem(known_sorting.__dict__, "cases", cases)
    with pytest.raises(ArenaError, match=sentence):
        grade_once(entries, tmp_path / "run", options)
    with open_run(tmp_path / "run") as store:
        assert store.cells() == []
