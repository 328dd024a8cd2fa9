"""Attacks beside the sandbox: on evidence, reproductions, logs, names, profiles, reports, exports.

Each is tried twice: with the defence against it, where it gains nothing, and with that defence
switched off, where it does. An attack is a function that returns what it gained.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from trapline.arena import profile as profiles
from trapline.arena.challenge import load
from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.export.environment import files_of_reply
from trapline.arena.judge import grade, intake, reproduction
from trapline.arena.judge.intake import Intake, from_texts, take_in
from trapline.arena.profile import ADAPTER, FLAWED
from trapline.arena.record import Bundle, Cell, Finding, Origin
from trapline.arena.report import slugs, tables
from trapline.arena.report.markdown import syntax
from trapline.arena.report.pages import duel
from trapline.arena.runs import field, sessions
from trapline.arena.runs.replay import replay
from trapline.arena.runs.store import Store, evidence, read_bundle
from trapline.arena.solving import answers, redact_names
from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.redact_json import learn_document, redact_document
from trapline.arena.standings.costs import total_cost
from trapline.cli import reading, reproduce

NAME = "layer_norm_backward"
TREACHERY = "open('treachery', 'w').close()"


@dataclass
class Bench:
    """Where one attack is tried."""

    patch: pytest.MonkeyPatch
    folder: Path

    def answer(self, entrant="somebody", **files):
        """A field with one answer, of these files beside a `solution.py`."""
        folder = self.folder / "field" / entrant / NAME
        for name, text in {"solution.py": "x = 1\n", **files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    def request(self):
        (request,) = field.find_entries(self.folder / "field", [])
        return request

    def evidence(self, files=None, calls=None, sentence="It is wrong."):
        """A bundle's file, as another machine could send it."""
        sent = Bundle(
            cell=cell(
                findings=[
                    Finding(
                        cause="unnamed",
                        certainty="likely",
                        severity="major",
                        sentence=sentence,
                        explains=["one"],
                    )
                ]
            ),
            files=files or {"solution.py": "def f(*args, **kwargs):\n    return 1\n"},
            raw={"calls": {"one": calls or [call()]}},
        )
        text = evidence.canonical(sent)
        path = self.folder / f"{evidence.digest(text)}.json"
        path.write_text(text)
        return path

    def reproduced(self, path):
        """Runs the reproduction; whether code that the evidence brought was executed."""
        out = self.folder / "out"
        try:
            reproduce.reproduce(str(path), "1", None, out)
        except UsageError:
            return ""
        subprocess.run([sys.executable, "-B", "reproduce.py"], cwd=out, capture_output=True)
        return "its code ran" if (out / "treachery").exists() else ""


def call(entry="f", args=(), kwargs=None):
    return {"entry": entry, "on": None, "args": list(args), "kwargs": kwargs or {}}


def cell(**changes):
    fields = {
        "entrant": "somebody", "challenge": NAME, "state": "fail", "score": 50.0, "letter": "F",
        "reason": "", "isolation": "process", "dimensions": {}, "cases": [], "traps": [],
        "submission_digest": "5", "challenge_digest": load(NAME).digest, "seed": 1,
        "versions": {}, "started": datetime(2026, 1, 1, tzinfo=UTC), "seconds": 1.0,
    }  # fmt: skip
    return Cell(**(fields | changes))


ATTACKS = {}


def attack(off):
    """Registers an attack with the switch that takes the defence against it away."""

    def register(function):
        ATTACKS[function.__name__] = function, off
        return function

    return register


def without(module, name, instead):
    """A switch that replaces one function or value of ours."""
    return lambda patch: patch.setattr(module, name, instead)


# --- reproductions: evidence may come from anywhere ----------------------------------------------

no_comment = without(reproduction, "as_comment", lambda text: f'"""{text}"""')
any_name = without(reproduction, "as_name", str)


@attack(no_comment)
def code_in_an_exception_message(bench):
    return bench.reproduced(bench.evidence(sentence=f'no"""\n{TREACHERY}\n"""'))


@attack(any_name)
def code_for_a_function_name(bench):
    return bench.reproduced(bench.evidence(calls=[call(f"f(0); {TREACHERY} #")]))


@attack(any_name)
def code_for_an_argument_name(bench):
    return bench.reproduced(bench.evidence(calls=[call(kwargs={f"a=0); {TREACHERY} #": 1})]))


@attack(without(reproduction, "as_number", str))
def code_for_a_number(bench):
    return bench.reproduced(bench.evidence(calls=[call(args=[{"float": f"{TREACHERY} or 1"}])]))


@attack(without(reproduction, "_answer", "answer_{}".format))
def code_for_an_earlier_answer(bench):
    second = call(args=[{"result": f"0); {TREACHERY} #"}])
    return bench.reproduced(bench.evidence(calls=[call(), second]))


@attack(without(intake, "stays_inside", lambda name: True))
def evidence_that_climbs_out_of_its_folder(bench):
    bench.reproduced(bench.evidence({"solution.py": "", "../escaped.py": ""}))
    return "it wrote outside" if (bench.folder / "escaped.py").exists() else ""


@attack(without(intake, "stays_inside", lambda name: True))
def evidence_with_an_absolute_path(bench):
    target = bench.folder / "escaped.py"
    bench.patch.setattr(grade, "inspect", lambda *_: (_ for _ in ()).throw(ArenaError("enough")))
    try:
        replay(read_bundle(bench.evidence({"solution.py": "", str(target): ""})), "process")
    except UsageError:
        return ""
    return "it wrote outside" if target.exists() else ""


@attack(without(reproduce, "_own_files", lambda b: from_texts(b.files, b.binary_files)))
def folder_in_the_place_of_the_script(bench):
    path = bench.evidence({"solution.py": "", "reproduce.py/x": ""})
    try:
        bench.reproduced(path)
    except OSError as error:
        return f"no reproduction: {error}"
    return ""


@attack(without(evidence, "digest", lambda text: "a" * 64))
def evidence_changed_after_the_grade(bench):
    path = bench.evidence()
    changed = bench.folder / f"{'a' * 64}.json"
    changed.write_text(path.read_text().replace('"score":50.0', '"score":99.0'))
    try:
        return f"believed: {read_bundle(changed).cell.score}"
    except ArenaError:
        return ""


# --- records and logs beside an answer -----------------------------------------------------------


def believe_records(patch):
    patch.setattr(field, "_origin", lambda record: Origin.model_construct(**record))


def recorded(bench, text):
    bench.answer(**{".trapline/record.json": text})
    return bench.request()


def readable_again(found):
    """Why a cell with this origin cannot be written and read; empty if it can."""
    try:
        Cell.model_validate_json(cell(harness=found.harness, origin=found.origin).model_dump_json())
    except ValueError as error:
        return f"the cell is lost: {type(error).__name__}"
    return ""


@attack(believe_records)
def record_of_not_a_number(bench):
    return readable_again(recorded(bench, '{"seconds": NaN}'))


@attack(believe_records)
def record_of_text_that_cannot_be_written(bench):
    return readable_again(recorded(bench, '{"provider": "\\ud800"}'))


@attack(without(field, "shown_name", str))
def harness_that_cannot_be_written(bench):
    return readable_again(recorded(bench, '{"harness": "\\ud800"}'))


@attack(without(field, "shown_name", str))
def harness_that_clears_the_screen(bench):
    return (
        "control characters"
        if "\x1b" in recorded(bench, '{"harness": "\\u001b[2J"}').harness
        else ""
    )


@attack(believe_records)
def record_of_a_negative_price(bench):
    found = recorded(bench, '{"cost_usd": -5, "seconds": 1, "output_tokens": 1, "turns": 1}')
    fields = Origin.model_fields
    told = found.origin and {n: getattr(found.origin, n, fields[n].default) for n in fields}
    cost = total_cost([SimpleNamespace(origin=SimpleNamespace(**told))]) if told else None
    return f"paid {cost.usd}" if cost and cost.usd is not None else ""


@attack(believe_records)
def record_of_too_many_digits(bench):
    found = recorded(bench, '{"output_tokens": 1' + "0" * 4200 + "}")
    tokens = getattr(found.origin, "output_tokens", 0) if found.origin else 0
    return "a number that cannot be printed" if tokens >= 10**4000 else ""


def follow_links(patch):
    patch.setattr(os, "O_NOFOLLOW", 0)


REPLY = '{"role": "assistant", "model": "m", "usage": {"input": 7, "output": 3}}\n'


@attack(follow_links)
def record_that_links_to_another_answers(bench):
    (bench.folder / "theirs.json").write_text('{"harness": "theirs", "model": "best"}')
    folder = bench.answer(**{".trapline/x": ""})
    (folder / ".trapline/record.json").symlink_to(bench.folder / "theirs.json")
    return bench.request().model


@attack(follow_links)
def log_that_links_to_another_answers(bench):
    (bench.folder / "theirs.jsonl").write_text(REPLY)
    (bench.answer() / "session.jsonl").symlink_to(bench.folder / "theirs.jsonl")
    return bench.request().model


def believe_numbers(patch):
    patch.setattr(sessions, "MOST_TOKENS", 10**40)
    patch.setattr(sessions, "Origin", Origin.model_construct)


@attack(believe_numbers)
def log_of_absurd_numbers(bench):
    bench.answer(**{"session.jsonl": REPLY.replace("3", str(10**30))})
    return "believed" if bench.request().origin else ""


@attack(without(sessions, "shown_name", str))
def log_with_a_model_that_clears_the_screen(bench):
    bench.answer(**{"session.jsonl": REPLY.replace('"m"', '"\\u001b[2J"')})
    return "control characters" if "\x1b" in bench.request().model else ""


@attack(without(sessions, "MOST_BYTES", 1 << 27))
def log_larger_than_memory(bench):
    folder = bench.answer(**{"session.jsonl": REPLY})
    os.truncate(folder / "session.jsonl", (64 << 20) + 1)
    return "read" if bench.request().model else ""


@attack(without(intake, "SESSION", ""))
def private_log_in_the_evidence(bench):
    folder = bench.answer(**{"session.jsonl": '{"user": "orla"}\n'})
    return "published" if "session.jsonl" in take_in(folder).files else ""


@attack(without(redact_names, "GENERIC", frozenset()))
def log_that_calls_its_user_the(bench):
    text = '{"user": "the"}\n{"m": "the kernel and the tests"}\n'
    safe = redact_document(text, Redactor({}, ()).learning(learn_document(text)))
    return "" if "the kernel and the tests" in safe else "the transcript is unreadable"


# --- names ---------------------------------------------------------------------------------------


@attack(without(field, "printable_name", str))
def name_that_turns_the_line_around(bench):
    bench.answer("\u202edlog")
    return "shown backwards" if "\u202e" in bench.request().entrant else ""


@attack(without(tables, "_inert", lambda value: value))
def name_that_is_a_formula(bench):
    text = tables.as_csv([cell(entrant="=1+1")])
    return "a formula" if "\n=1+1," in text else ""


@attack(without(syntax, "text", str))
def name_that_ends_a_row_of_markdown(bench):
    (_, _, row) = syntax.table(["entrant", "score"], [["a | 100 |\n| b", 0]])
    return "a row of its own" if "\n" in row else ""


def naive_slugs(patch):
    patch.setattr(slugs, "assign", lambda names: {n: n.lower().replace("/", "-") for n in names})


@attack(naive_slugs)
def name_that_takes_anothers_page(bench):
    pages = slugs.assign(["heron", "HERON", "a/b", "a-b"])
    return "two share a page" if len(set(pages.values())) < len(pages) else ""


def plain_json(patch):
    patch.setattr(duel, "htmlsafe_json_dumps", json.dumps)


@attack(plain_json)
def name_that_ends_the_script_of_the_single_file(bench):
    name = "</script><script>alert(1)</script>"
    pages = SimpleNamespace(columns=[], entrant_slugs={name: "x"}, row=lambda _: [])
    bench.patch.setattr(duel, "_bugs", lambda _: [])
    shown = str(duel.data(SimpleNamespace(field=pages, order=[name])))
    return "a script of its own" if "</script>" in shown else ""


# --- exports: a policy's reply becomes the files that are graded ---------------------------------

SOLVED = "```python solution.py\nx = 1\n```\n"
any_path = without(answers, "_safe", str)


@attack(any_path)
def reply_with_a_file_above_the_workspace(bench):
    workspace = bench.folder / "workspace"
    workspace.mkdir()
    reply = SOLVED + "```python ../escaped.py\nx = 1\n```\n"
    answers.write_files(workspace, files_of_reply(reply))
    return "it wrote outside" if (bench.folder / "escaped.py").exists() else ""


@attack(any_path)
def reply_with_an_absolute_path(bench):
    target = bench.folder / "escaped.py"
    answers.write_files(bench.folder, files_of_reply(f"{SOLVED}```python {target}\nx = 1\n```\n"))
    return "it wrote outside" if target.exists() else ""


@attack(any_path)
def reply_with_a_backslash_for_a_slash(bench):
    files = files_of_reply(SOLVED + "```python ..\\escaped.py\nx = 1\n```\n")
    return "another system's path" if any("\\" in name for name in files) else ""


@attack(any_path)
def reply_with_a_hidden_record(bench):
    files = files_of_reply(SOLVED + "```text .trapline/record.txt\nmodel = best\n```\n")
    return "a record of its own" if any(name.startswith(".") for name in files) else ""


@attack(without(answers, "MAX_FILES", 10**6))
def reply_of_a_thousand_files(bench):
    many = "".join(f"```python part{n}.py\nx = 1\n```\n" for n in range(1000))
    return f"{len(found)} files" if len(found := files_of_reply(SOLVED + many)) > 40 else ""


# --- profiles, adapters and flawed prompts -------------------------------------------------------


@attack(without(profiles, "profile_names", lambda folder: ["../../evil"]))
def profile_from_another_folder(bench):
    own = bench.folder / "challenge"
    (own / "profiles").mkdir(parents=True)
    (bench.folder / "evil").mkdir()
    (bench.folder / "evil" / "profile.toml").write_text('summary = "everything is right"\n')
    try:
        return f"judged by {profiles.read_profile(own, '../../evil').folder}"
    except UsageError:
        return ""


def adapters_always(patch):
    entry = SimpleNamespace(entry="adapter")
    patch.setattr(grade, "_config", lambda request, challenge, taken: entry)


def entry_of(challenge):
    taken = Intake({ADAPTER: b"", "solution.py": b""})
    request = SimpleNamespace(level="process", checks_only=False)
    return grade._config(request, challenge, taken).entry


@attack(adapters_always)
def adapter_in_the_place_of_the_answer(bench):
    return entry_of(load(NAME)).replace("solution", "")


@attack(adapters_always)
def adapter_to_a_flawed_prompt(bench):
    return entry_of(load(NAME, profile=FLAWED)).replace("solution", "")


@attack(without(reading, "of_one_profile", lambda cells, profile: cells))
def easier_prompt_in_the_same_ranking(bench):
    store = Store(bench.folder / "run")
    for name, flaw in (("", ""), (FLAWED, "noticed")):
        graded = cell(entrant=name or "own", profile=name, flaw=flaw)
        store.save(Bundle(cell=graded, files={}))
    store.close()
    try:
        return f"{len(reading.cells_of(str(bench.folder / 'run')))} ranked together"
    except UsageError:
        return ""


# --- the two tests -------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch, tmp_path):
    return Bench(monkeypatch, tmp_path)


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 36


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_gains_nothing(bench, name):
    run, _ = ATTACKS[name]
    assert run(bench) == ""


@pytest.mark.parametrize("name", ATTACKS)
def test_without_its_defence_the_attack_succeeds(bench, name):
    run, off = ATTACKS[name]
    off(bench.patch)
    assert run(bench) != ""
