"""The whole report as one HTML file: every page a section, shown by its address.

`:target` chooses the section, so links work without scripts and from any place.
"""

import base64
import posixpath
import re
from collections.abc import Callable
from html import escape

from trapline.arena.report.site import Site

_MAIN = re.compile(r'<main id="main"[^>]*>(.*)</main>', re.DOTALL)
#: Attributes that name ids of their own page.
_IDS = re.compile(r'\b(id|for|aria-labelledby|data-copy-link)="([^"]+)"')
_LINK = re.compile(r'\bhref="([^"]*)"')
_URL = re.compile(r"url\(#([^)]+)\)")
#: The duel's script finds these by their ids.
_KEPT = frozenset({"duel-a", "duel-b", "duel-result", "duel-data"})
_DATA = {"cells.csv": "text/csv", "cells.json": "application/json"}


def single_file(site: Site, on_page: Callable[[int, int], None] = lambda _d, _t: None) -> str:
    """One self-contained page; bundles stay outside, for they are larger than all the rest."""
    sections = []
    for done, path in enumerate(site.pages, start=1):
        found = _MAIN.search(site.render(path) or "")
        inner = _rewritten(site, path, found[1]) if found else ""
        sections.append(f'<section class="page" id="{page_id(path)}">{inner}</section>')
        on_page(done, len(site.pages))
    first = site.render("index.html") or ""
    before, after = (_rewritten(site, "", part) for part in _MAIN.sub("\0", first).split("\0"))
    before = before.replace('<html lang="en"', '<html lang="en" data-single', 1)
    body = "\n".join(sections)
    return f'{before}<main id="main" class="wrap" tabindex="-1">\n{body}\n</main>{after}'


def page_id(path: str) -> str:
    """cells/a--b.html is the section `cells--a--b`."""
    return path.removesuffix(".html").replace("/", "--")


def _rewritten(site: Site, path: str, html: str) -> str:
    """The page's ids made unique by its name, and its links turned to sections."""
    prefix = f"{page_id(path)}." if path else ""

    def own(match: re.Match[str]) -> str:
        names = [name if name in _KEPT else prefix + name for name in match[2].split()]
        return f'{match[1]}="{" ".join(names)}"'

    def link(match: re.Match[str]) -> str:
        return _address(site, path, prefix, match[1])

    html = _IDS.sub(own, html)
    html = _URL.sub(rf"url(#{prefix}\1)", html)
    return _LINK.sub(link, html)


def _address(site: Site, path: str, prefix: str, href: str) -> str:
    if href.startswith("#"):
        return f'href="#{prefix}{href[1:]}"'
    file, _, fragment = href.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
    if target in site.pages:
        inner = f".{fragment}" if fragment and "=" not in fragment else ""
        return f'href="#{page_id(target)}{inner}"'
    if target in _DATA:
        data = base64.b64encode((site.render(target) or "").encode()).decode()
        return f'href="data:{_DATA[target]};base64,{data}"'
    if target in site.files:
        return f'data-file="{escape(target)}"'
    return f'href="{href}"'
