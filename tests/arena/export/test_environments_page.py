"""The table of docs/environments.md can be written anew, and states the noise of this tree."""

import importlib.util
import re
from pathlib import Path

import pytest

from trapline.arena.challenge import load_all
from trapline.arena.export.noise import reward_noise

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
    record = {"cores": 7, "load": [0.25, 1.0, 1.0], "seconds": seconds}
    text = script.PAGE.read_text()
    new = script.page(text, record)
    assert new.count("| 2.0 / 3.0 |") == len(load_all())
    assert "on 7 cores, at load 0.2 before" in new
    assert script.page(new, record) == new
    paragraphs = [one.split("\n\n") for one in (text, new)]
    changed = [old for old, now in zip(*paragraphs, strict=True) if old != now]
    assert [one[:12] for one in changed] == ["| task | rew", "Seconds are "]


@pytest.mark.parametrize("name", list(load_all()))
def test_page_states_the_noise_within_one_point(script, name):
    """New bugs are added often; `python benchmarks/quick_reward.py --page` counts them."""
    (row,) = re.findall(rf"^\| `{name}` \|.*$", script.PAGE.read_text(), re.MULTILINE)
    stated = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) =", row)]
    for (survivors, mutants), checks_only in zip(stated, (True, False), strict=True):
        noise = reward_noise(load_all()[name], checks_only=checks_only)
        assert survivors / mutants == pytest.approx(noise.share, abs=0.01)
        assert mutants == pytest.approx(noise.mutants, rel=0.1)
