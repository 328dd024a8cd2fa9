"""The table of docs/environments.md can be written anew."""

import importlib.util
from pathlib import Path

import pytest

from trapline.arena.challenge import load_all

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "quick_reward", ROOT / "benchmarks" / "quick_reward.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_new_table_replaces_the_old_one_and_nothing_else(script):
    seconds = {name: {"gold": 1.0, "broken": 3.0} for name in load_all()}
    text = script.PAGE.read_text()
    new = script.page(text, seconds)
    assert new.count("| 2.0 / 3.0 |") == len(load_all())
    assert script.page(new, seconds) == new
    tables = [
        {line for line in one.splitlines() if not line.startswith("| `")} for one in (text, new)
    ]
    assert tables[0] == tables[1]
