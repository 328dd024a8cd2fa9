"""The twins study at toy size: every kind once, the file of each run, and no run twice."""

import importlib.util
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from trapline.gold.errors import RangeError
from trapline.gold.ternary.training.tokenizer import encode, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("river", "stone", "light", "market", "window", "garden", "winter", "letter")
SIZE = ("--dim", "256", "--layers", "1", "--heads", "4", "--vocab", "270", "--context", "8")
TIME = ("--steps", "4", "--sweep-steps", "2", "--batch", "4", "--evaluate-every", "2")


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """The script with arguments, on a small text; what it said and left."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    place = ROOT / "benchmarks" / "ternary_twins.py"
    spec = importlib.util.spec_from_file_location("ternary_twins", place)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ternary_twins", module)
    spec.loader.exec_module(module)
    small = tmp_path / "text.txt"
    small.write_text(
        "\n\n".join(f"the {WORDS[n % 8]} saw {n} letters in {n * n}" for n in range(90))
    )
    out = tmp_path / "out"

    def run(*args, text=small):
        texts = [str(text)] if text else []
        given = ["twins", *texts, "--out", str(out), "--device", "cpu", "--threads", "1"]
        monkeypatch.setattr(sys, "argv", [*given, *SIZE, *TIME, "--held-out", "0.2", *args])
        module.main()
        return capsys.readouterr().out, json.loads((out / "twins.json").read_text())

    return run


def test_a_run_is_not_run_again(study):
    options = ("--only", "ternary", "--rates", "0.06", "0.12", "--seeds", "0")
    said, left = study(*options)
    assert said.count(" s {") == 3
    (run,) = left["kinds"]["ternary"]["runs"]
    assert run["gap of the exported file"] == 0.0
    # Nearly every token of so small a vocabulary is one byte.
    assert 0.8 < np.log2(run["perplexity"]) / run["bits a byte"] < 2.0
    again, same = study(*options)
    assert " s {" not in again
    assert same == left


QUICK = ("--only", "dense", "--rates", "0.1", "--seeds", "0")


@pytest.mark.parametrize(
    ("option", "before", "now"),
    [
        (("--batch", "8"), "4", "8"),
        (("--optimiser", "muon"), "adamw", "muon"),
        (("--learn-scales",), "False", "True"),
        (("--tokens", "300"), "none", "300"),
        (("--average", "20"), "50", "20"),
        (("--held-out", "0.3"), "0.2", "0.3"),
        (("--evaluate-every", "1"), "2", "1"),
    ],
)
def test_a_folder_takes_runs_of_one_setting(study, tmp_path, option, before, now):
    """Files of runs do not say these: another setting would get the first one's figures."""
    study(*QUICK)
    left = (tmp_path / "out" / "twins.json").read_text()
    with pytest.raises(SystemExit, match=rf"with {option[0]} {before}, .* {now}:"):
        study(*QUICK, *option)
    assert (tmp_path / "out" / "twins.json").read_text() == left


def test_what_runs_are_named_by_may_change(study):
    study(*QUICK)
    more = ("--rates", "0.2", "--decays", "0.1", "--seeds", "1", "--steps", "2", "--until", "60")
    said, _ = study(*QUICK, *more, "--threads", "2")
    assert said.count(" s {") == 1


def test_a_text_may_be_left_out_but_not_replaced(study, tmp_path):
    study(*QUICK)
    said, _ = study(*QUICK, text=None)
    assert " s {" not in said
    other = tmp_path / "other.txt"
    other.write_text("one\n\ntwo")
    with pytest.raises(SystemExit, match=r"with texts .*text\.txt, .* .*other\.txt:"):
        study(*QUICK, text=other)


def test_unreadable_text_is_not_recorded(study, tmp_path):
    with pytest.raises(RangeError, match="cannot be read"):
        study(*QUICK, text=tmp_path / "mistyped.txt")
    said, _ = study(*QUICK)
    assert said.count(" s {") == 1


def test_runs_from_before_settings_were_kept_are_taken(study, tmp_path):
    study(*QUICK)
    kept = tmp_path / "out" / "asked.json"
    before = kept.read_text()
    kept.unlink()
    said, _ = study(*QUICK)
    assert " s {" not in said
    assert kept.read_text() == before


def test_processes_may_sit_on_several_gpus(monkeypatch):
    """Of one kind: which of them a run had makes no difference."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from twins_asked import settings

    asked = [settings(Namespace(texts=[], device=name)) for name in ("cuda", "cuda:1", "cpu")]
    assert asked[0] == asked[1] != asked[2]


def test_tokens_have_the_bytes_of_their_text(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from twins_text import token_bytes

    documents = ["the garden, the märket — 窓", "the winter letter"]
    tokenizer = train_tokenizer(documents, 270)
    stream = encode(tokenizer, documents)
    in_a_file = "\f".join(documents) + "\f"
    assert token_bytes(tokenizer)[stream].sum() == len(in_a_file.encode())


@pytest.mark.full
def test_every_kind_is_run_once(study):
    options = ("--rates", "0.06", "0.12", "--softs", "0.5", "0.7", "--seeds", "0")
    said, left = study(*options)
    kinds = {"dense", "ternary", "equal bytes", "distilled", "student", "collapse"}
    assert set(left["kinds"]) == kinds
    assert all(run["kind"] for run in left["sweep"])
    for kind in ("ternary", "distilled", "student"):
        (run,) = left["kinds"][kind]["runs"]
        assert run["gap of the exported file"] == 0.0
        assert run["steps"] == 4
    assert said.count(" s {") == len(left["sweep"]) + 6


def test_what_another_process_does_is_left_to_it(study, tmp_path):
    """A claim of one that lives is kept, one of a process that is gone is taken away."""
    options = ("--only", "dense", "--rates", "0.1", "--seeds", "0", "1")
    runs = tmp_path / "out" / "runs"
    runs.mkdir(parents=True)
    claims = [runs / f"dense-rate-0.1-seed-{seed}-steps-4.claim" for seed in (0, 1)]
    nobody = 1 << 22 | 1  # Linux counts processes up to 2^22; one that ended may have an heir
    for claim, owner in zip(claims, (os.getpid(), nobody), strict=True):
        claim.write_text(str(owner))
    said, left = study(*options)
    assert said.count(" s {") == 1
    assert [run["seed"] for run in left["kinds"]["dense"]["runs"]] == [1]
    assert [claim.exists() for claim in claims] == [True, False]


def test_time_that_is_up_leaves_what_there_is(study):
    said, left = study("--only", "dense", "--rates", "0.1", "--seeds", "0", "1", "--until", "-1")
    assert "are left" in said
    assert left["kinds"] == {}


def test_a_sweep_over_all_steps_keeps_every_twin_and_a_student_learns_from_the_best(study):
    options = ("--only", "dense", "student", "--rates", "0.001", "0.1", "--sweep-steps", "4")
    _, left = study(*options, "--seeds", "0")
    dense = {run["rate"]: run["perplexity"] for run in left["sweep"] if run["kind"] == "dense"}
    (best,) = left["kinds"]["dense"]["runs"]
    assert best["rate"] == 0.1
    assert best["perplexity"] < dense[0.001]
    (student,) = left["kinds"]["student"]["runs"]
    assert student["teaching"]["teacher"] == "rate-0.1-seed-0"
