"""Paths that cannot be written to are refused before any work is done."""

import pytest
from typer.testing import CliRunner

from trapline.arena.errors import UsageError
from trapline.cli.main import FAILURE, build, guarded


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("report", "published", "--out", "file"), "file is a file; a site is a folder"),
        (("report", "published", "--format", "markdown", "--out", "file"), "is a file"),
        (("report", "published", "--format", "csv", "--out", "file"), "without the ending .csv"),
        (("certify", "--write", "nowhere/kills.md"), "there is no folder nowhere"),
        (("certify", "--write", "folder"), "folder is a folder; the matrix is a file"),
        (("redact", "folder", "--out", "file"), "file is a file"),
        (("export", "--out", "file"), "file is a file"),
        (("train", "file", "--out", "file"), "file is a file; a run is a folder"),
        (("export", "folder", "--format", "predictions", "--out", "folder"), "is a folder"),
        (("report", "published", "--out", "file/site"), "cannot write file/site: file is a file"),
        (("report", "published", "--format", "markdown", "--out", "file/a/b"), "file is a file"),
        (("report", "published", "--format", "csv", "--out", "file/cells"), "file is a file"),
        (("report", "published", "--format", "csv", "--out", "file/x.csv"), "file is a file"),
        (("redact", "folder", "--out", "file/public"), "cannot write file/public: file is a file"),
        (("export", "--out", "file/tasks"), "cannot write file/tasks: file is a file"),
        (("export", "--out", "/proc/none"), "cannot write /proc/none: "),
        (("certify", "--write", "file/kills.md"), "file is a file"),
        (("deploy", "file/field", "--entrant", "me"), "cannot write file/field: file is a file"),
        (("grade", "field", "--out", "file/run"), "cannot write file/run: file is a file"),
        (("train", "file", "--out", "file/run"), "cannot write file/run: file is a file"),
        (("pack", "folder", "file/packed"), "cannot write file/packed: file is a file"),
        (("pack", "folder", "file/m.gguf", "--format", "f16"), "file is a file"),
    ],
)
def test_wrong_output_path_is_refused(tmp_path, monkeypatch, args, sentence):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "field" / "me" / "kv_cache").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(build(), args)
    assert isinstance(result.exception, UsageError)
    assert sentence in str(result.exception)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "args", [("certify", "--require-isolation", "steel"), ("certify", "--seed", "-1")]
)
def test_invalid_option_values_are_refused(args):
    assert CliRunner().invoke(build(), args).exit_code == 2


@pytest.mark.parametrize("verb", [("certify",), ("grade", "FIELD")])
def test_missing_level_is_exit_code_three(verb, tmp_path, monkeypatch, capsys):
    from trapline.arena.runs import executor

    folder = tmp_path / "field" / "me" / "kv_cache"
    folder.mkdir(parents=True)
    (folder / "solution.py").write_text("")
    monkeypatch.setattr(executor, "why_not", lambda level: "bwrap is not installed")
    args = [str(tmp_path / "field") if part == "FIELD" else part for part in verb]
    args += ["--out", str(tmp_path / "run")] if "grade" in verb else []
    app = build()
    with pytest.raises(SystemExit) as ended:
        guarded(lambda: app([*args, "--isolation", "bubblewrap"], prog_name="trapline"))
    assert ended.value.code == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "this machine does not offer isolation 'bubblewrap': bwrap is not installed" in said


def test_full_disk_is_reported_in_one_sentence(capsys):
    def program():
        raise OSError(28, "No space left on device", "runs/demo")

    with pytest.raises(SystemExit) as ended:
        guarded(program)
    assert ended.value.code == FAILURE
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory: you tried")]
)
def test_lack_of_memory_is_reported_in_one_sentence(capsys, error):
    def program():
        raise error

    with pytest.raises(SystemExit) as ended:
        guarded(program)
    assert ended.value.code == FAILURE
    assert "does not have enough memory" in " ".join(capsys.readouterr().err.split())


def test_unexpected_errors_are_not_hidden():
    def program():
        raise RuntimeError("a defect of ours")

    with pytest.raises(RuntimeError, match="a defect of ours"):
        guarded(program)


@pytest.mark.parametrize("option", ["--certificates", "--red-team"])
@pytest.mark.parametrize("text", ["x", "{}", '{"certificates": [{}]}'])
def test_wrong_file_content_is_reported_in_one_sentence(tmp_path, option, text):
    (tmp_path / "other.json").write_text(text)
    args = ("report", "published", option, str(tmp_path / "other.json"))
    error = CliRunner().invoke(build(), args).exception
    assert isinstance(error, UsageError)
    assert "other.json does not contain" in str(error)
    assert "\n" not in str(error)
