"""A challenge's digest names everything that can change a verdict; its traps may have parts."""

import sys

import pytest

from trapline.arena import challenge
from trapline.arena import judge_dependencies as dependencies
from trapline.arena.challenge import Challenge, load
from trapline.arena.errors import UsageError
from trapline.arena.judge_dependencies import judge_dependencies

TRAP = (
    "from trapline.arena.judge.traps import edit, trap\n"
    "@trap(catches='c', severity='minor', story='s', mutant=edit('a', 'b'))\n"
    "def {0}(submission, rng): pass\n"
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in the place of ours: two challenges, one of which reads the other."""
    files = {
        "gold/thing/__init__.py": "NAME = 1\n",
        "gold/thing/oracle.py": "from trapline.gold import errors\n",
        "gold/thing/fast.py": "",
        "gold/errors.py": "",
        "challenges/first/cases.py": "from trapline.gold.thing import oracle\n",
        "challenges/first/traps.py": "import trapline.gold.thing.oracle\nimport numpy\n",
        "challenges/second/cases.py": "from trapline.challenges.first.cases import helper\n",
        "challenges/second/traps.py": "from trapline.gold.thing import NAME\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    return tmp_path


def test_oracles_and_their_imports_are_dependencies(package):
    modules = (package / "challenges/first").glob("*.py")
    assert set(judge_dependencies(modules)) == {
        "trapline/gold/thing/oracle.py",
        "trapline/gold/errors.py",
    }


def test_checks_of_another_challenge_are_dependencies_with_their_oracle(package):
    modules = (package / "challenges/second").glob("*.py")
    assert set(judge_dependencies(modules)) == {
        "trapline/challenges/first/cases.py",
        "trapline/gold/thing/__init__.py",
        "trapline/gold/thing/oracle.py",
        "trapline/gold/errors.py",
    }


def test_backward_challenge_depends_on_the_forward_challenge():
    names = judge_dependencies(load("flash_attention_backward").judge_modules)
    assert "trapline/challenges/flash_attention_forward/cases.py" in names
    assert "trapline/gold/attention/oracle.py" in names


def _digest(sorting, folder):
    copy = Challenge(folder, "sorting")
    assert copy.id == sorting.id
    return copy.digest


def test_challenge_is_known_only_while_it_ships(sorting, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(challenge, "load_all", lambda *_: {"sorting": sorting})
        assert load("sorting") is sorting
    with pytest.raises(UsageError, match="unknown challenge 'sorting'"):
        load("sorting")


def test_profile_is_read_once():
    first = load("kv_cache", profile="published")
    assert load("kv_cache", "cpu", "published") is first


def test_changed_oracle_is_another_digest(sorting, package, tmp_path_factory):
    folder = tmp_path_factory.mktemp("challenges") / "sorting"
    folder.mkdir()
    toml = (sorting.folder / "challenge.toml").read_text()
    (folder / "challenge.toml").write_text(toml)
    (folder / "cases.py").write_text("from trapline.gold.thing import oracle\n")
    before = _digest(sorting, folder)
    assert _digest(sorting, folder) == before
    (package / "gold/thing/fast.py").write_text("FASTER = True\n")
    assert _digest(sorting, folder) == before
    (package / "gold/errors.py").write_text("CHANGED = True\n")
    assert _digest(sorting, folder) != before


def test_parts_are_collected_in_the_order_listed(sorting, tmp_path, monkeypatch):
    folder = tmp_path / "inparts"
    folder.mkdir()
    (folder / "challenge.toml").write_text((sorting.folder / "challenge.toml").read_text())
    (folder / "__init__.py").write_text('"""In parts."""\n')
    for name in ("late", "early"):
        (folder / f"traps_{name}.py").write_text(TRAP.format(name))
    text = "from inparts import traps_early, traps_late\nPARTS = (traps_late, traps_early)\n"
    (folder / "traps.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    challenge = Challenge(folder, "inparts")
    try:
        assert [trap.id for trap in challenge.traps] == ["late", "early"]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "inparts"]:
            del sys.modules[name]
