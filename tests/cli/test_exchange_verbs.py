"""solve, export, scan and redact as people meet them: sentences, exit codes, files."""

import gzip
import json
import sys

import pytest

from trapline.arena.challenge import load
from trapline.arena.runs.field import EXAMPLE_FIELD

CHALLENGE = "fused_softmax_topk"
SECRET = "mail kim@mail.example.com\n"
AGENT = "import pathlib; pathlib.Path('solution.py').write_text('def softmax_topk(a, k): ...\\n')"


@pytest.mark.parametrize("verb", ["solve", "export", "scan", "redact"])
def test_help_of_every_verb_has_an_example(trapline, verb):
    done = trapline(verb, "--help")
    assert (done.returncode, "Example" in done.stdout) == (0, True)


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("solve", "f"), 2, "exactly one of --endpoint"),
        (("solve", "f", "--endpoint", "http://x", "--agent", "pi"), 2, "exactly one of"),
        (("solve", "f", "--endpoint", "http://x"), 2, "--model is missing"),
        (("solve", "f", "--agent", "nobody", "--model", "m"), 2, "no agent 'nobody'"),
        (("solve", "f", "--agent-cmd", "no-such-program-x", "--model", "m"), 3, "not installed"),
        (("solve", "f", "--from-predictions", "absent.jsonl"), 2, "cannot be read"),
        (("solve", "f", "--from-predictions", "p", "--model", "m"), 2, "names its models itself"),
        (("solve", "f", "--from-predictions", "p", "--entrant", "e"), 2, "names its models itself"),
        (("solve", "f", "--agent", "pi", "--model", "m", "--rounds", "3"), 2, "need --endpoint"),
        (("solve", "f", "--agent", "pi", "--model", "m", "--input-usd", "3"), 2, "need --endpoint"),
        (
            ("solve", "f", "--endpoint", "u", "--model", "m", "--budget-usd", "-1"),
            2,
            "or equal to 0",
        ),
        (("certify", "--red-team", "--challenge", CHALLENGE), 2, "the whole red team"),
        (("certify", "--red-team", "--mechanical"), 2, "the whole red team"),
        (("export", "somewhere", "--format", "harbor"), 2, "remove the run or field"),
        (("export", "--format", "predictions"), 2, "needs the field"),
        (("export", "--format", "gymnasium"), 2, "is not one of"),
        (("export", "somewhere", "--format", "verifiers"), 2, "remove the run or field"),
        (("export", "--format", "inspect", "--images", "ghcr.io/me"), 2, "needs --format harbor"),
        (("export", "--format", "hf-kernels", "--challenge", CHALLENGE), 2, "exports the library"),
        (("export", "nowhere", "--format", "eval"), 2, "no run"),
        (("export", "--format", "inspect", "--challenge", "juggling"), 2, "unknown challenge"),
        (("scan", "nowhere"), 2, "no such folder"),
        (("redact", "nowhere"), 2, "no such file"),
        (("grade", EXAMPLE_FIELD, "--judge-model", "m"), 2, "both --judge-endpoint"),
    ],
)
def test_bad_input_gets_a_sentence_and_the_right_exit_code(trapline, args, code, sentence):
    done = trapline(*args)
    assert done.returncode == code, done.stderr
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("form", ["harbor", "inspect", "verifiers", "hf-kernels"])
def test_export_into_a_foreign_folder_is_refused(trapline, tmp_path, form):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.md").write_text("kept")
    done = trapline("export", "--format", form, "--out", "mine")
    assert (done.returncode, "is not empty and was not written by" in done.stderr) == (2, True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.md"]


def test_refused_images_leave_no_folder(trapline, tmp_path):
    done = trapline("export", "--images", "Me", "--out", "out")
    assert (done.returncode, "registry and owner" in done.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_export_adds_to_its_own_folder(trapline, tmp_path):
    for name in (CHALLENGE, "kv_cache"):
        done = trapline("export", "--format", "verifiers", "--out", "out", "--challenge", name)
        assert (done.returncode, f"out/trapline_{name}" in done.stdout) == (0, True)


def test_challenge_that_is_named_twice_is_exported_once(trapline, tmp_path):
    twice = ("--challenge", CHALLENGE) * 2
    done = trapline("export", "--format", "verifiers", "--out", "out", *twice)
    assert (done.returncode, done.stdout) == (0, f"out/trapline_{CHALLENGE}\n")


def test_an_agents_answer_goes_out_as_a_prediction_and_comes_back(trapline, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    agent = f"{sys.executable} {tmp_path / 'agent.py'}"
    solve = ("solve", "field", "--agent-cmd", agent, "--model", "org/m", "--challenge", CHALLENGE)
    done = trapline(*solve)
    assert (done.returncode, f"org-m/{CHALLENGE} #1: solved" in done.stdout) == (0, True)
    done = trapline("export", "field", "--format", "predictions")
    assert "predictions.jsonl: 1 predictions" in done.stdout
    done = trapline("solve", "back", "--from-predictions", "predictions.jsonl")
    assert done.returncode == 0, done.stderr
    answers = [tmp_path / root / "org-m" / CHALLENGE / "attempt-1" for root in ("field", "back")]
    assert len({(answer / "solution.py").read_text() for answer in answers}) == 1


def test_a_copied_answer_is_a_finding(trapline, tmp_path):
    gold = tmp_path / "somebody" / CHALLENGE / "solution.py"
    gold.parent.mkdir(parents=True)
    gold.write_text((load(CHALLENGE).solution / "solution.py").read_text())
    done = trapline("scan", tmp_path, "--json")
    assert done.returncode == 4
    (found,) = json.loads(done.stdout)["suspicions"]
    assert (found["entrant"], found["leak"]["kind"]) == ("somebody", "gold")
    done = trapline("scan", tmp_path, "--trust", "somebody")
    assert (done.returncode, done.stdout.strip()) == (0, "0 findings")


def test_a_transcript_is_published_without_its_secrets(trapline, tmp_path):
    line = json.dumps({"message": "mail\nkim@mail.example.com"})
    (tmp_path / "raw.jsonl").write_text(line + "\n")
    assert trapline("redact", "raw.jsonl").returncode == 4
    done = trapline("redact", "raw.jsonl", "--out", "public")
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "public/raw.jsonl").read_text()) == {"message": "mail\n<email>"}


def test_file_names_are_scanned_too(trapline, tmp_path):
    named = tmp_path / "raw" / "kim@mail.example.com" / "session.jsonl"
    named.parent.mkdir(parents=True)
    named.write_text("nothing to hide\n")
    done = trapline("redact", "raw", "--out", "public")
    assert (done.returncode, "email kim@… in the path" in done.stdout) == (4, True)
    assert not (tmp_path / "public").exists()


@pytest.mark.parametrize(
    "content",
    [gzip.compress(SECRET.encode()), SECRET.encode("utf-16")],
    ids=["compressed", "wide"],
)
def test_binary_files_are_not_published(trapline, tmp_path, content):
    (tmp_path / "raw").write_bytes(content)
    done = trapline("redact", "raw", "--out", "public")
    assert (done.returncode, "raw: not a text file" in done.stdout) == (4, True)
    assert not (tmp_path / "public").exists()


def test_empty_folder_is_refused(trapline, tmp_path):
    (tmp_path / "raw").mkdir()
    done = trapline("redact", "raw")
    assert (done.returncode, "raw contains no files" in done.stderr) == (2, True)
