"""A field as predictions, and predictions as a field that is graded."""

import json
import shutil
from dataclasses import replace

import pytest

from trapline.arena.errors import UsageError
from trapline.arena.export.predictions import read_predictions, write_predictions
from trapline.arena.judge.grade import grade
from trapline.arena.judge.intake import take_in
from trapline.arena.runs import field
from trapline.arena.solving.predicted import assign_predictions
from trapline.arena.solving.solve import solve_all


@pytest.fixture
def sorted_field(known_sorting, tmp_path, monkeypatch):
    """Two attempts of one entrant, one of another."""
    monkeypatch.setattr(field, "load_all", lambda *_: {"sorting": known_sorting})
    root = tmp_path / "field"
    for number in (1, 2):
        shutil.copytree(known_sorting.solution, root / f"able/sorting/attempt-{number}")
    (root / "able/sorting/attempt-2/extra.py").write_text("x = 1")
    (root / "idle/sorting").mkdir(parents=True)
    (root / "idle/sorting/solution.py").write_text("# nothing\n")
    return root


def line(patch, challenge="sorting", model="org/model:1"):
    return json.dumps(
        {"instance_id": challenge, "model_name_or_path": model, "model_patch": patch, "more": 1}
    )


def solve_predictions(path, root):
    work = assign_predictions(path, root, [])
    return [record for solver, todo in work for _, record in solve_all(todo, solver, 1)]


def test_out_and_in_again_gives_the_same_bytes(sorted_field, tmp_path):
    before = field.find_entries(sorted_field, [])
    path = tmp_path / "predictions.jsonl"
    assert write_predictions(before, path) == 3
    first = json.loads(path.read_text().splitlines()[0])
    assert set(first) == {"instance_id", "model_name_or_path", "model_patch"}
    records = solve_predictions(path, tmp_path / "back")
    assert [record.status for record in records] == ["solved"] * 3
    after = field.find_entries(tmp_path / "back", [])
    assert [(e.entrant, e.attempt, e.harness) for e in after] == [
        ("able", 1, "predictions"),
        ("able", 2, "predictions"),
        ("idle", 1, "predictions"),
    ]
    for old, new in zip(before, after, strict=True):
        found = dict(take_in(new.folder).files)
        found.pop("prompt.md")
        assert found == take_in(old.folder).files


def test_patch_outside_the_folder_writes_nothing_and_is_no_answer(
    sorted_field, known_sorting, tmp_path, level
):
    path = tmp_path / "predictions.jsonl"
    path.write_text(line("--- /dev/null\n+++ b/../../../evil.py\n@@ -0,0 +1 @@\n+x = 1\n"))
    (record,) = solve_predictions(path, tmp_path / "back")
    assert (record.status, "leads out" in record.reason) == ("no_answer", True)
    assert not list(tmp_path.rglob("evil.py"))
    (entry,) = field.find_entries(tmp_path / "back", [])
    assert (entry.entrant, entry.model) == ("org-model-1", "org/model:1")
    assert grade(replace(entry, level=level, seed=3), known_sorting).cell.state == "no_answer"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "holds no predictions"),
        ("{not json", "line 1 is not valid JSON"),
        ('{"instance_id": "sorting"}', "model_name_or_path"),
        (line("x", challenge="juggling"), "prediction 1: unknown challenge 'juggling'"),
        (line("x", model="../up"), "not an entrant name"),
    ],
)
def test_bad_file_gets_a_sentence(known_sorting, tmp_path, text, reason):
    path = tmp_path / "predictions.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        assign_predictions(path, tmp_path, [])
    with pytest.raises(UsageError, match="cannot be read"):
        read_predictions(tmp_path / "absent.jsonl")


def test_list_is_read_like_lines(known_sorting, tmp_path):
    path = tmp_path / "predictions.json"
    path.write_text(f"[{line('x')},\n{line('y')}]")
    assert [attempt for _, attempt, _ in read_predictions(path)] == [1, 2]
