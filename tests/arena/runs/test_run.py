"""A run as a whole: what is done is not done again, and a machine that cannot judge does not."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from trapline.arena.certify.certify import Certifier
from trapline.arena.errors import ArenaError, UsageError, Violation
from trapline.arena.judge.draws import DrawKey
from trapline.arena.judge.traps import Case
from trapline.arena.process.sandbox import why_not
from trapline.arena.record import Dimension, Origin
from trapline.arena.runs import executor, field, run
from trapline.arena.runs.run import Options, grade_field, open_run
from trapline.arena.standings.ranking import ranking


@pytest.fixture
def entries(known_sorting, tmp_path, monkeypatch, no_measures):
    """One entrant, right, without tests of its own."""
    for module in (field, run):
        monkeypatch.setattr(module, "load", lambda *_, **__: known_sorting)
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": known_sorting})
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


@pytest.fixture
def worthless(entries, monkeypatch):
    """An entry that is graded at once, on a machine that is not examined."""
    monkeypatch.setattr(run, "_check_once", lambda *_: None)
    (entries[0].folder / "solution.py").write_text("")
    return entries


def graded_seed(entries, folder, options):
    with open_run(folder) as store:
        (cell,) = grade_field(entries, store, options)
        return cell.seed


def test_answer_that_was_changed_back_does_not_wait_for_ever(worthless, tmp_path, options):
    """A grader planned the changed bytes and died."""
    graded_seed(worthless, tmp_path / "run", options)
    with open_run(tmp_path / "run") as store:
        store.plan([worthless[0].key])
        assert list(grade_field(worthless, store, options)) == []
        assert store.waiting() == {}


def test_same_bytes_meet_the_same_situations_in_every_run(worthless, tmp_path, options):
    first, again = (graded_seed(worthless, tmp_path / name, options) for name in ("run", "again"))
    assert first == again
    (worthless[0].folder / "solution.py").write_text("# changed")
    assert graded_seed(worthless, tmp_path / "run", options) != first


def test_answers_can_meet_the_same_situations(worthless, tmp_path, options):
    """Drawn for all of them: the same in every run of these answers, others if one is changed."""
    other = tmp_path / "field" / "other" / "sorting"
    other.mkdir(parents=True)
    (other / "solution.py").write_text("# another")
    both = field.find_entries(tmp_path / "field", [])

    def seeds(name, **same):
        with open_run(tmp_path / name) as store:
            return [cell.seed for cell in grade_field(both, store, replace(options, **same))]

    one, two = seeds("run", same_draws=True)
    assert one == two
    assert seeds("again", same_draws=True) == [one, one]
    assert len({one, *seeds("apart")}) == 3
    (other / "solution.py").write_text("# changed")
    assert one not in seeds("changed", same_draws=True)


@pytest.mark.parametrize(("together", "fix"), [(True, "add"), (False, "leave out")])
def test_run_does_not_mix_shared_and_own_draws(worthless, tmp_path, options, together, fix):
    grade_once(worthless, tmp_path / "run", replace(options, same_draws=together))
    (worthless[0].folder / "solution.py").write_text("# changed")
    with pytest.raises(UsageError, match=f"{fix} --same-draws, or choose another --out"):
        grade_once(worthless, tmp_path / "run", replace(options, same_draws=not together))
    seeded = replace(options, seed=7)
    grade_once(worthless, tmp_path / "seeded", seeded)
    grade_once(worthless, tmp_path / "seeded", replace(seeded, same_draws=True))


def test_answers_that_share_draws_are_fixed_before_the_seed_is_known(worthless, tmp_path, options):
    folders = [worthless[0].folder, tmp_path / "field" / "other" / "sorting"]
    folders[1].mkdir(parents=True)
    (folders[1] / "solution.py").write_text("# another")
    both = field.find_entries(tmp_path / "field", [])
    wanted = {entry.read().digest for entry in both}
    found = set()
    with open_run(tmp_path / "run") as store:
        for cell in grade_field(both, store, replace(options, same_draws=True)):
            found.add(cell.submission_digest)
            for folder in folders:
                (folder / "solution.py").write_text(f"# fitted to {cell.seed}")
    assert found == wanted


def test_given_seed_holds_for_the_whole_run(worthless, tmp_path, options):
    place = tmp_path / "run"
    assert graded_seed(worthless, place, replace(options, seed=7)) == 7
    (worthless[0].folder / "solution.py").write_text("# changed")
    assert graded_seed(worthless, place, options) == 7
    with pytest.raises(UsageError, match="is graded with seed 7: leave out --seed"):
        grade_once(worthless, place, replace(options, seed=8))
    grade_once(worthless, tmp_path / "other", options)
    with pytest.raises(UsageError, match="is graded with a seed for each answer"):
        grade_once(worthless, tmp_path / "other", replace(options, seed=7))


def test_run_says_that_its_key_was_not_kept(worthless, tmp_path, options, monkeypatch):
    monkeypatch.setattr(run, "draw_key", lambda: DrawKey(b"k", "there is no room"))
    grade_once(worthless, tmp_path / "run", options)
    with open_run(tmp_path / "run") as store:
        assert store.meta()["draw_key"] == "of one process, not kept: there is no room"


def test_session_log_gives_the_cell_its_cost(entries, tmp_path, options):
    grade_once(entries, tmp_path / "run", options)
    reply = {"role": "assistant", "model": "m", "usage": {"input": 7, "output": 3}}
    (entries[0].folder / "session.jsonl").write_text(json.dumps(reply) + "\n")
    found = field.find_entries(tmp_path / "field", [])
    assert grade_once(found, tmp_path / "run", options) == ["somebody"]
    assert grade_once(found, tmp_path / "run", options) == []
    with open_run(tmp_path / "run") as store:
        (cell,) = store.cells()
        assert cell.origin == Origin(input_tokens=7, output_tokens=3, turns=1)
        assert "session.jsonl" not in store.bundle(cell.bundle).files
        (standing,) = ranking([cell], rounds=1).standings
    assert (standing.cost.input_tokens, standing.cost.turns) == (7, 1)


def _answer_beside(entries, *folders):
    """Further answers with the text of the first entrant's."""
    for folder in folders:
        place = entries[0].folder.parents[1] / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "solution.py").write_text((entries[0].folder / "solution.py").read_text())


def _graded(tmp_path, options):
    told = []
    found = field.find_entries(tmp_path / "field", [], on_skipped=told.append)
    with open_run(tmp_path / "run") as store:
        cells = {(c.entrant, c.attempt): c for c in grade_field(found, store, options)}
    return cells, told


@pytest.mark.parametrize("name", [b"two\nlines", b"\x1b[2Jclear", b"\xff\xfe"])
def test_entrant_with_an_unprintable_name_does_not_stop_the_others(
    entries, tmp_path, options, name
):
    literal = field.printable_name(os.fsdecode(name))  # another entrant may be called so
    _answer_beside(entries, f"{os.fsdecode(name)}/sorting", f"{literal}/sorting")
    cells, _ = _graded(tmp_path, options)
    assert [cells.pop((good, 1)).state for good in ("somebody", literal)] == ["pass", "pass"]
    (((shown, _), bad),) = cells.items()
    assert shown.isprintable()
    assert (bad.state, bad.score) == ("fail", 0.0)
    assert bad.reason.endswith("cannot be printed; rename the folder")


def test_second_first_attempt_is_graded_neither_way_and_stops_no_other(entries, tmp_path, options):
    _answer_beside(entries, *(f"evil/sorting{where}" for where in ("", "/attempt-1", "/attempt-2")))
    cells, _ = _graded(tmp_path, options)
    bad = cells.pop(("evil", 1))
    assert (bad.state, bad.score) == ("fail", 0.0)
    assert bad.reason == "the folder holds two first attempts: solution.py and attempt-1"
    assert {key: cell.state for key, cell in cells.items()} == {
        ("evil", 2): "pass",
        ("somebody", 1): "pass",
    }
    shutil.rmtree(tmp_path / "field" / "evil" / "sorting" / "attempt-1")
    cells, _ = _graded(tmp_path, options)
    assert {key: cell.state for key, cell in cells.items()} == {("evil", 1): "pass"}


def test_folder_of_no_challenge_is_told_and_stops_no_other(entries, tmp_path, options):
    _answer_beside(entries, "evil/sorting\x1b")
    cells, told = _graded(tmp_path, options)
    assert {key: cell.state for key, cell in cells.items()} == {("somebody", 1): "pass"}
    (sentence,) = told
    assert sentence.isprintable()
    assert "does not name a challenge" in sentence
    with pytest.raises(UsageError, match="does not name a challenge"):
        field.find_entries(tmp_path / "field", [])
    shutil.rmtree(tmp_path / "field" / "somebody")
    with pytest.raises(UsageError, match="does not name a challenge"):
        _graded(tmp_path, options)


def test_cells_of_another_level_are_graded_again_when_a_level_is_forced(entries, tmp_path):
    place = tmp_path / "run"
    assert grade_once(entries, place, Options("process", workers=1)) == ["somebody"]
    assert grade_once(entries, place, Options("landlock", workers=1)) == []
    forced = Options("landlock", workers=1, only_this_level=True)
    if reason := why_not("landlock"):
        pytest.skip(reason)
    assert grade_once(entries, place, forced) == ["somebody"]
    assert grade_once(entries, place, forced) == []


def unfair(submission, rng):
    raise Violation("nothing is right on this machine")


@pytest.mark.parametrize(
    ("cases", "sentence"),
    [
        ([Case("unfair", unfair)], "a right answer was called wrong"),
        ([Case("blind", lambda submission, rng: None)], "a worthless answer passes every case"),
    ],
)
@pytest.mark.parametrize("gold", [False, True])
def test_machine_that_fails_its_check_does_not_grade(
    entries, tmp_path, options, monkeypatch, known_sorting, cases, sentence, gold
):
    monkeypatch.setitem(known_sorting.__dict__, "cases", cases)
    entries = field.find_entries(tmp_path / "field", [], gold)
    with pytest.raises(ArenaError, match=sentence):
        grade_once(entries, tmp_path / "run", options)
    with open_run(tmp_path / "run") as store:
        assert store.cells() == []


@pytest.fixture
def asked_of_gold(monkeypatch):
    """What a check of the machine asked of the gold solution."""
    asked = []
    for name in ("right_on_cases", "own_tests"):
        one = getattr(Certifier, name)
        monkeypatch.setattr(
            Certifier, name, lambda self, name=name, one=one: asked.append(name) or one(self)
        )
    return asked


def test_gold_cell_shows_that_the_machine_can_grade(entries, tmp_path, options, asked_of_gold):
    both = field.find_entries(tmp_path / "field", [], gold=True)
    assert grade_once(both, tmp_path / "run", options) == ["gold", "somebody"]
    assert asked_of_gold == []
    with open_run(tmp_path / "run") as store:
        noted = [fact for fact in store.meta() if fact.startswith("machine ")]
        assert list(store.meta()[noted[0]]) == ["sorting"]
    grade_once(entries, tmp_path / "alone", options)
    assert asked_of_gold == ["right_on_cases", "own_tests"]


def _with_a_failing_case(cell):
    failing = cell.cases[0].model_copy(update={"state": "fail"})
    return {"cases": [failing, *cell.cases[1:]]}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda cell: {"state": "infra_error", "dimensions": {}},
        _with_a_failing_case,
        lambda cell: {"dimensions": {"tests": Dimension(score=0.0, reason="they fail")}},
    ],
    ids=["not measured", "a case fails", "its tests fail"],
)
def test_gold_cell_that_is_not_right_leads_to_the_whole_check(
    entries, tmp_path, options, asked_of_gold, monkeypatch, wrong
):
    grade = executor.grade

    def spoiled(*args):
        bundle = grade(*args)
        cell = bundle.cell.model_copy(update=wrong(bundle.cell))
        return bundle.model_copy(update={"cell": cell})

    monkeypatch.setattr(executor, "grade", spoiled)
    both = field.find_entries(tmp_path / "field", [], gold=True)
    grade_once([entry for entry in both if entry.entrant == "gold"], tmp_path / "run", options)
    assert asked_of_gold == ["right_on_cases", "own_tests"]


def test_rounds_of_a_field_are_read_and_must_name_challenges(tmp_path):
    (tmp_path / "field.toml").write_text('[rounds]\n"round 1" = ["kv_cache", "dflash"]\n')
    assert field.read_settings(tmp_path).rounds == {"round 1": ["kv_cache", "dflash"]}
    (tmp_path / "field.toml").write_text('[rounds]\n"round 1" = ["kv-cache"]\n')
    with pytest.raises(UsageError, match="round 1 names 'kv-cache', and the challenges are: fused"):
        field.read_settings(tmp_path)
    (tmp_path / "field.toml").write_text('[rounds]\n"round 1" = "kv_cache"\n')
    with pytest.raises(UsageError, match="a table \\[rounds\\] of lines"):
        field.read_settings(tmp_path)


def test_challenges_with_long_cells_are_graded_first():
    asked = ["fused_softmax_topk", "kv_cache", "ternary_training"]
    entries = field.find_entries(field.EXAMPLE_FIELD, asked)
    order = [entry.challenge for entry in run._longest_first(entries)]
    assert list(dict.fromkeys(order)) == ["ternary_training", "kv_cache", "fused_softmax_topk"]
    assert sorted(order) == sorted(entry.challenge for entry in entries)
