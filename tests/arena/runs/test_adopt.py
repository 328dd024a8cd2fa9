"""A tree of answers to other prompts, written by us, becomes a field and is graded."""

import json
from pathlib import Path

import pytest

from trapline.arena.errors import UsageError
from trapline.arena.runs.adopt import AdoptOptions, adopt
from trapline.arena.runs.field import find_entries
from trapline.arena.runs.run import Options, grade_field, open_run
from trapline.cli.main import build

HERE = Path(__file__).parent
TREE, ADAPTERS = HERE / "standin_tree", HERE / "standin_adapters"
OPTIONS = AdoptOptions("published", ADAPTERS)


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    """The field, and what was said of each task folder."""
    field = tmp_path_factory.mktemp("adopted") / "field"
    return field, {one.source: one for one in adopt(TREE, field, OPTIONS)}


@pytest.mark.parametrize(
    ("source", "challenge"),
    [
        ("alder/layer_norm", "layer_norm_backward"),
        ("alder/attention_forward", "flash_attention_forward"),
        ("alder/beams", "beam_search"),
        ("birch/Layernorm-BWD", "layer_norm_backward"),
        ("birch/flash-fwd", "flash_attention_forward"),
        ("birch/batched beam search", "beam_search"),
        ("cedar/task-a", "layer_norm_backward"),
        ("cedar/task-b", "flash_attention_forward"),
    ],
)
def test_names_prompts_and_layouts_are_recognised(adopted, source, challenge):
    field, found = adopted
    one = found[source]
    assert (one.challenge, one.adopted) == (challenge, True), one.sentence
    assert (field / one.entrant / challenge / "adapter.py").is_file()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("cedar/beam_search", "need an adapter"),
        ("dogwood/layer_norm", "2 candidates for layer_norm_forward: one.py: layer_norm_forward"),
        ("dogwood/flash_attention", "no file can be parsed (broken.py does not parse (line 1)"),
        ("dogwood/beam_search", "imports the judge"),
        ("dogwood/something", "neither the folder's name nor a prompt"),
    ],
)
def test_what_cannot_be_adopted_is_said_in_one_sentence(adopted, source, words):
    field, found = adopted
    one = found[source]
    assert not one.adopted
    assert words in one.sentence
    assert not (field / one.entrant / (one.challenge or "none")).exists()


def test_markdown_in_a_python_file_is_said(adopted):
    assert adopted[1]["cedar/beam_search"].notes == [
        "README.py is Markdown with code blocks, not Python"
    ]


def test_nothing_of_an_answer_is_changed_or_lost(adopted):
    field, _ = adopted
    for name in ("norm.py", "NOTES.md", "test_norm.py"):
        copy = field / "alder" / "layer_norm_backward" / name
        assert copy.read_bytes() == (TREE / "alder" / "layer_norm" / name).read_bytes()


def graded(field, run, challenges):
    entries = find_entries(field, challenges)
    with open_run(str(run)) as store:
        list(grade_field(entries, store, Options("process", workers=2)))
        return {(cell.entrant, cell.challenge): cell for cell in store.cells()}


def test_the_field_is_graded_under_the_profile(adopted, tmp_path):
    cells = graded(adopted[0], tmp_path / "run", ["beam_search"])
    assert {cell.profile for cell in cells.values()} == {"published"}
    assert cells["gold", "beam_search"].score == cells["alder", "beam_search"].score == 100.0
    wrong = cells["birch", "beam_search"]
    assert wrong.state == "fail"
    assert [(f.cause, f.certainty) for f in wrong.findings] == [("end-costs-nothing", "confirmed")]


@pytest.mark.full
def test_all_three_tasks_are_graded(adopted, tmp_path):
    cells = graded(adopted[0], tmp_path / "run", [])
    assert len(cells) == 8 + 3
    states = {key: cell.state for key, cell in cells.items()}
    assert [key for key, state in states.items() if state != "pass"] == [
        ("birch", "beam_search"),
        ("cedar", "flash_attention_forward"),
        ("cedar", "layer_norm_backward"),
    ]
    assert cells["cedar", "layer_norm_backward"].findings[0].cause == "mean-term-missing"
    assert {cells["gold", challenge].score for _, challenge in cells} == {100.0}


def test_a_tree_without_answers_is_an_error(tmp_path):
    (tmp_path / "tree" / "somebody" / "empty").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no answers"):
        adopt(tmp_path / "tree", tmp_path / "out", OPTIONS)
    with pytest.raises(UsageError, match="is not a folder"):
        adopt(tmp_path / "none", tmp_path / "out", OPTIONS)


def test_a_tree_of_unknown_tasks_says_the_first(tmp_path):
    folder = tmp_path / "tree" / "somebody" / "sorting"
    folder.mkdir(parents=True)
    (folder / "sort.py").write_text("")
    with pytest.raises(UsageError, match=r"none of the 1 task folders .* somebody/sorting: not"):
        adopt(tmp_path / "tree", tmp_path / "out", OPTIONS)


def test_the_field_must_be_new_and_outside_the_tree(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not empty"):
        adopt(TREE, tmp_path, OPTIONS)
    with pytest.raises(UsageError, match="lies inside the tree"):
        adopt(TREE, TREE / "field", OPTIONS)


def test_the_verb_says_each_thing_once(tmp_path, capsys):
    arguments = ["adopt", str(TREE), "--out", str(tmp_path / "f"), "--adapters", str(ADAPTERS)]
    build("adopt")(arguments, standalone_mode=False)
    told = capsys.readouterr().out
    assert told.count("broken.py does not parse") == 1
    assert "adopted 8 of" in told


def test_the_verb_prints_what_it_found(tmp_path, capsys):
    app = build("adopt")
    arguments = ["adopt", str(TREE), "--out", str(tmp_path / "f"), "--adapters", str(ADAPTERS)]
    app([*arguments, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)["answers"]
    assert sum(one["adopted"] for one in found) == 8
