"""docs/library.md: its programs run as they stand, and its table is that of the code."""

import re
import sys
from pathlib import Path

import pytest

import trapline.gold as gold
from trapline.gold import impl

pytest.importorskip("torch")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "library.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
#: Text that the output of each program contains.
EXPECTED = [
    ["gradient of the queries: (1, 8, 256, 64)"],
    ["0 101 (1, 8, 64)", "1 101 (1, 8, 64)"],
    ["length", " is a\nreference to the kernel"],
    ["The kernel", "This file", "A page of memory"],
    ["largest difference: "],
]


def test_the_page_has_five_programs():
    assert len(SNIPPETS) == len(EXPECTED) == 5


@pytest.mark.parametrize("number", range(5))
def test_programs_run_as_they_stand(number, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["snippet.py"])
    code = compile(SNIPPETS[number], f"docs/library.md, program {number + 1}", "exec")
    exec(code, {"__name__": "__main__"})
    said = capsys.readouterr().out
    for text in EXPECTED[number]:
        assert text in said
    for difference in re.findall(r"^largest difference.*: (\S+)$", said, re.MULTILINE):
        assert float(difference) < 1e-5
    assert not list(tmp_path.iterdir())


def test_the_table_is_that_of_the_code():
    def rows(text):
        return re.findall(r"^\| [a-z_, ]+ \| [a-z, ]+ \|$", text, re.MULTILINE)

    assert rows(PAGE) == rows(impl.__doc__)
    assert len(rows(PAGE)) > 5


def test_the_reference_lists_every_public_name():
    listed = re.findall(r"^::: trapline\.gold\.(.+)$", (DOCS / "reference.md").read_text(), re.M)
    assert sorted(listed) == sorted(f"{home}.{name}" for name, home in gold._HOMES.items())


def test_pages_of_the_site_exist():
    pages = re.findall(r": (\S+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.M)
    assert len(pages) > 15
    assert [page for page in pages if not (DOCS / page).is_file()] == []


def test_links_between_pages_lead_to_files():
    links = [
        (page, page.parent / target)
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"\]\((?!https?:)([\w./-]+)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 50
    assert [(page.name, file.name) for page, file in links if not file.exists()] == []
