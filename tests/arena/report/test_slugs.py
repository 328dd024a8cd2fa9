"""File names from hostile entrant names."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trapline.arena.report.slugs import assign, slug


def test_plain_name_is_its_own_slug():
    assert slug("layer_norm_backward") == "layer_norm_backward"


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "<script>", "", ".", "CON:", "a\0b", "ü" * 90]
)
def test_hostile_name_becomes_a_safe_file_name(name):
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]*", slug(name))
    assert len(slug(name)) <= 60


def test_names_differing_in_case_get_different_files():
    assert slug("Heron") != slug("heron")
    assert slug("Heron").lower() == slug("Heron")


def test_name_equal_to_another_slug_gets_its_own_file():
    stolen = slug("Heron")
    assert len(set(assign(["Heron", stolen]).values())) == 2


@given(st.sets(st.text(max_size=60), max_size=12))
def test_slugs_are_safe_distinct_and_never_hold_the_joiner(names):
    chosen = assign(names)
    assert set(chosen) == names
    assert len(set(chosen.values())) == len(names)
    for one in chosen.values():
        assert re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", one)
        assert "--" not in one
        assert ".." not in one
