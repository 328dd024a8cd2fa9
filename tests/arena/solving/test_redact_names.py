"""Transcripts of other machines: names are learned where they show and hidden everywhere."""

import json
from collections import Counter

import pytest

from trapline.arena.solving.redact import Redactor
from trapline.arena.solving.redact_json import learn_document, redact_document, scan_document
from trapline.arena.solving.redact_names import learn_names
from trapline.cli.main import main

#: Where a name shows, and the name.
TELLING = [
    ("cd /home/orla/kernels && ls", "orla"),
    ("wrote /Users/orla.byrne/notes.txt", "orla.byrne"),
    (r"C:\Users\orla\AppData", "orla"),
    (r"C:\\Users\\orla\\AppData", "orla"),
    ("C:/Users/orla/AppData", "orla"),
    ("/mnt/c/Users/orla/src", "orla"),
    ("file:///home/orla/x.py", "orla"),
    ("open %2Fhome%2Forla%2Fx", "orla"),
    (r"\/home\/orla\/x", "orla"),
    ("projects/-home-orla-kernels/1.jsonl", "orla"),
    ("projects/-Users-orla-kernels/1.jsonl", "orla"),
    ("projects/C--Users-orla-kernels/1.jsonl", "orla"),
    ("-rw-r--r--  1 orla staff  120 May  3 10:00 a.py", "orla"),
    ("drwxr-xr-x@ 5 orla staff  160 May  3 10:00 b", "orla"),
    ("orla@tinbox:~/src$ make", "orla"),
    ("orla@tinbox:~/src$ make", "tinbox"),
    ("USER=orla", "orla"),
    ("config = {'username': 'orla'}", "orla"),
    ("Author: Orla Byrne <x@y.example>", "Orla Byrne"),
    ("git config user.name 'Orla Byrne'", "Orla Byrne"),
]
#: What looks alike and names nobody.
SILENT = [
    "User: implement the kernel",
    "user: please add tests",
    "def login(user=None, username=name): ...",
    "https://example.org/home/explore",
    "drop -rf and --home-dir",
    "/home/ubuntu/x and /root/y and /Users/Shared/z",
    "scores = q@keys.T",
    "{'role': 'user', 'user': 'user'}",
]
#: Absolute paths of somebody's machine, and those that every machine has.
PATHS = [
    "/mnt/storage/orla/run.py",
    "/srv/people/o",
    "/data/checkpoints/7",
    "/tmp/orla-42/a.txt",
    "/var/folders/zz/h5_x/T",
    "/Volumes/Disk/x",
    "/opt/orla/bin",
    r"D:\work\orla\a.py",
    "D:/work/orla/a.py",
]
KEPT = [
    "/usr/lib/python3/site.py",
    "/bin/sh",
    "/dev/null",
    "/etc/hosts",
    "POST /v1/chat/completions",
    "https://example.org/a/b/c",
    "./a/b/c and ../a/b and ~/a/b",
    "dx = dy / n / m; and/or; 1/2/3; </div>",
    "/help",
    "x[i:j] / (a/b)",
]


@pytest.fixture
def redactor():
    return Redactor(environment={}, names=())


@pytest.mark.parametrize(("text", "name"), TELLING)
def test_name_is_learned(text, name):
    assert name in learn_names(text)


@pytest.mark.parametrize("text", SILENT)
def test_no_name_is_learned_from_ordinary_text(text):
    assert learn_names(text) == frozenset()


@pytest.mark.parametrize("path", PATHS)
def test_absolute_path_is_hidden(redactor, path):
    text = f'File "{path}", line 3; then {path} and PATH=/bin:{path}'
    safe = redactor.redact(text)
    assert path not in safe
    assert safe.count("<path>") == 3
    assert redactor.scan(text)
    assert redactor.scan(safe) == []


@pytest.mark.parametrize("text", KEPT)
def test_path_of_every_machine_is_kept(redactor, text):
    assert redactor.redact(text) == text
    assert redactor.scan(text) == []


def session():
    """A session log as an agent on another machine writes it."""
    lines = [
        {"type": "session", "cwd": "/home/orla/kernels", "user": "orla", "host": "x"},
        {"type": "user", "message": {"role": "user", "content": "orla wants a kernel"}},
        {"type": "tool", "output": "total 8\n-rw-r--r-- 1 orla ceili 9 May 1 1:00 a.py\n"},
        {"type": "tool", "output": json.dumps({"login": "Fionn Daly", "path": "/srv/x/y"})},
        {"type": "text", "text": "Thanks, Fionn. Saved to -home-orla-kernels/a; Orla_2 is next."},
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_names_of_another_machine_are_hidden_everywhere(redactor):
    text = session()
    learned = learn_document(text)
    assert {"orla", "Fionn Daly", "Fionn"} <= learned
    hidden = Counter()
    safe = redact_document(text, redactor.learning(learned), hidden)
    assert [word for word in ("orla", "Orla", "Fionn", "Daly", "/srv/x") if word in safe] == []
    assert scan_document(safe, redactor.learning(learned)) == []
    assert learn_document(safe) == frozenset()
    assert [json.loads(line)["type"] for line in safe.splitlines()] == [
        json.loads(line)["type"] for line in text.splitlines()
    ]
    assert "wants a kernel" in safe
    assert hidden["home"] == 2
    assert hidden["path"] == 1
    assert hidden["name"] >= 5
    again = Counter()
    assert redact_document(safe, redactor.learning(learned), again) == safe
    assert again.total() == 0


def test_without_learning_the_names_stay(redactor):
    """Why names are learned: no pattern knows that `orla` is a name in prose."""
    assert "orla wants" in redact_document(session(), redactor)


def test_value_of_a_user_key_is_hidden_even_when_too_short_to_hide_elsewhere(redactor):
    text = '{"user": "al", "n": 3}'
    assert [found.kind for found in scan_document(text, redactor)] == ["name"]
    assert json.loads(redact_document(text, redactor)) == {"user": "<name>", "n": 3}


def test_everyday_words_survive_a_user_of_that_name(redactor):
    text = "cd /home/max; np.max(x) and /home/test/test_a.py"
    safe = redactor.learning(learn_names(text)).redact(text)
    assert safe == "cd <home>; np.max(x) and <home>/test_a.py"


def test_hint_does_not_repeat_a_short_name(redactor):
    found = redactor.learning({"orla"}).scan("orla")
    assert [one.hint for one in found] == ["o…"]


@pytest.fixture
def run(monkeypatch):
    """Runs the command; returns its exit code."""

    def started(*args):
        monkeypatch.setattr("sys.argv", ["trapline", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0

    return started


def test_command_learns_from_all_files_and_counts_by_kind(run, tmp_path, capsys):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.jsonl").write_text(session())
    (raw / "b.txt").write_text("a note to orla, written by Sive\n")
    assert run("redact", raw) == 4
    assert " home" in capsys.readouterr().out.splitlines()[-1]
    assert run("redact", raw, "--out", tmp_path / "public", "--name", "Sive") == 0
    told = capsys.readouterr().out
    assert "removed: " in told
    assert "2 home" in told
    assert (tmp_path / "public/b.txt").read_text() == "a note to <name>, written by <name>\n"
    assert run("redact", tmp_path / "public") == 0


def test_name_in_a_file_name_stops_the_copy(run, tmp_path, capsys):
    raw = tmp_path / "-home-orla-kernels"
    raw.mkdir()
    (raw / "s.jsonl").write_text("{}\n")
    assert run("redact", tmp_path, "--out", tmp_path / "public") == 4
    assert "in the path" in capsys.readouterr().out


def test_too_short_name_is_refused(run, tmp_path, capsys):
    (tmp_path / "a").write_text("x")
    assert run("redact", tmp_path / "a", "--name", " ") == 2
    assert "two characters or more" in " ".join(capsys.readouterr().err.split())
