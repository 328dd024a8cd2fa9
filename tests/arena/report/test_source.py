"""Highlighted source: every character there, none of it alive."""

import html
import re

from hypothesis import given
from hypothesis import strategies as st

from trapline.arena.report import source


def shown(markup: str) -> str:
    """What a browser would show."""
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def test_keywords_strings_and_comments_are_marked():
    rendered = source.render("solution.py", "def f():\n    return 'x'  # why\n")
    assert '<span class="k">def</span>' in rendered
    assert '<span class="nf">f</span>' in rendered
    assert '<span class="c"># why</span>' in rendered


def test_closing_script_tag_is_text():
    rendered = source.render("solution.py", "x = '</script><script>alert(1)</script>'\n")
    assert "<script" not in rendered
    assert "</script" not in rendered


def test_other_files_are_escaped_text():
    assert source.render("notes.md", "<b>&") == "&lt;b&gt;&amp;"


def test_long_file_is_cut():
    assert len(shown(source.render("a.py", "x = 1\n" * 40_000))) <= source.LONGEST + 1


@given(st.text(alphabet=st.sampled_from("abdef '\"#\\\n()<>&@1\t"), max_size=200))
def test_python_is_shown_as_it_was_written(text):
    expected = text if text.endswith("\n") else text + "\n"
    assert shown(source.render("a.py", text)) == expected
