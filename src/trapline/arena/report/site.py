"""The report as a set of pages, each rendered on request."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trapline.arena.certify.certify import Certificate
from trapline.arena.judge import rubric
from trapline.arena.record import CheckResult
from trapline.arena.report import evidence, findings, formats, preview, tables
from trapline.arena.report.catalog import ChallengeInfo
from trapline.arena.report.field import letter_class
from trapline.arena.report.pages import (
    cell,
    challenge,
    duel,
    entrant,
    kills,
    methodology,
    overview,
    reproduction,
    said,
    standings,
    traps,
)
from trapline.arena.report.reading import Reading
from trapline.arena.report.runview import RunView
from trapline.arena.report.said_measured import said_measured
from trapline.arena.runs.store import canonical

NAV = (
    ("index.html", "Overview"),
    ("standings.html", "Standings"),
    ("comparison.html", "Comparison"),
    ("duel.html", "Duel"),
    ("traps.html", "Traps"),
    ("kills.html", "Kill matrix"),
    ("said.html", "Said and measured"),
    ("reproduction.html", "Reproduction"),
    ("methodology.html", "Methodology"),
)
MANIFEST = "trapline-report.txt"
#: The picture that a link to the report shows, written where its address is known.
PREVIEW = "preview.png"
_STATIC = Path(__file__).parent / "static"
Page = Callable[[], dict[str, Any]]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("trapline.arena.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {
        "figure": formats.figure,
        "figure0": formats.figure0,
        "signed": formats.signed,
        "percent": formats.percent,
        "chance": formats.chance,
        "rank_set": formats.rank_set,
        "named": formats.named,
        "cost": formats.cost,
        "cut": evidence.cut,
        "letter_class": letter_class,
        "tags": tags,
        "opening": findings.opening,
    }
    environment.globals |= {
        "rubric": rubric,
        "letters": [letter for letter, _ in rubric.LETTERS],
        "css": _own("site.css"),
        "theme_js": _own("theme.js"),
        "site_js": _own("site.js"),
        "csp": content_security_policy(),
        "favicon": favicon(),
    }
    return environment


def favicon() -> str:
    """The mark of the masthead as a data address."""
    svg = (_STATIC / "favicon.svg").read_bytes()
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def tags(checks: Sequence[CheckResult], kind: str = "") -> Markup:
    """Ids as a row of tags, as one string: a large field has a hundred thousand."""
    return Markup(" ").join(
        Markup('<span class="tag {}">{}</span>').format(kind, check.id) for check in checks
    )


def _own(name: str) -> Markup:
    return Markup((_STATIC / name).read_text(encoding="utf-8"))  # noqa: S704 - nothing of a submission is in it


def content_security_policy() -> str:
    """Allows only our two scripts and loads nothing from other hosts."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(_own(name).encode()).digest()).decode()}'"
        for name in ("theme.js", "site.js")
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


class Site:
    def __init__(
        self,
        run: RunView,
        *,
        told: Mapping[str, ChallengeInfo] | None = None,
        certificates: Sequence[Certificate] = (),
        live: bool = False,
        url: str = "",
    ) -> None:
        self.reading = Reading(run, told)
        self.certificates = certificates
        self.live = live
        #: Where the report will be published; a preview's picture needs a whole address.
        self.url = url

    @cached_property
    def pages(self) -> dict[str, tuple[str, Page]]:
        """Path → template and the function that gives its context."""
        reading, field = self.reading, self.reading.field
        found: dict[str, tuple[str, Page]] = {
            "index.html": ("overview.html", partial(overview.context, reading)),
            "standings.html": ("standings.html", partial(standings.context, reading)),
            "duel.html": ("duel.html", partial(duel.context, reading)),
            "methodology.html": ("methodology.html", partial(methodology.context, reading)),
        }
        if reading.run.chosen:
            found["comparison.html"] = ("pair.html", partial(duel.together, reading))
        if reading.executed:
            found["traps.html"] = ("traps.html", partial(traps.context, reading))
        if reading.executed or self.certificates:
            fill = partial(kills.context, reading, self.certificates)
            found["kills.html"] = ("kills.html", fill)
        if published := said_measured(reading.run):
            found["said.html"] = ("said.html", partial(said.context, reading, published))
        if reading.run.reproduction:
            found["reproduction.html"] = (
                "reproduction.html",
                partial(reproduction.context, reading),
            )
        for name in field.entrants:
            found[field.entrant_href(name)] = (
                "entrant.html",
                partial(entrant.context, reading, name),
            )
        for name in field.challenges:
            found[field.challenge_href(name)] = (
                "challenge.html",
                partial(challenge.context, reading, name),
            )
        for one in field.run.cells:
            found[field.cell_href(one)] = ("cell.html", partial(cell.context, reading, one))
        for a, b in duel.pairs(reading):
            found[duel.href(reading, a, b)] = ("pair.html", partial(duel.pair, reading, a, b))
        return found

    @cached_property
    def files(self) -> dict[str, Callable[[], str]]:
        run = self.reading.run
        found: dict[str, Callable[[], str]] = {
            "cells.csv": lambda: tables.as_csv(run.cells),
            "cells.json": lambda: tables.as_json(run.cells),
        }
        for digest in run.bundles:
            found[f"bundles/{digest}.json"] = partial(self._bundle, digest)
        return found

    def _bundle(self, digest: str) -> str:
        return canonical(self.reading.run.bundles[digest])

    def render(self, path: str) -> str | None:
        if path in self.pages:
            template, fill = self.pages[path]
            return self._render(path, template, fill())
        make = self.files.get(path)
        return make() if make else None

    def _render(self, path: str, template: str, context: dict[str, Any]) -> str:
        shared = self.reading.shared | {
            "root": "../" * path.count("/"),
            "here": path,
            "live": self.live,
            "version": self.reading.version,
            "nav": [(href, text) for href, text in NAV if href in self.pages],
            "description": self.reading.ranking.conclusion,
            "preview": f"{self.url.rstrip('/')}/{PREVIEW}" if self.url else "",
        }
        return self._templates.get_template(template).render(shared | context)

    @cached_property
    def _templates(self) -> Environment:
        return _environment()


def write_site(
    run: RunView,
    out: Path,
    *,
    told: Mapping[str, ChallengeInfo] | None = None,
    certificates: Sequence[Certificate] = (),
    url: str = "",
    on_page: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Writes every page and file under `out`; returns the path of the first page."""
    site = Site(run, told=told, certificates=certificates, url=url)
    paths = [*site.pages, *site.files]
    _forget_pages(out, [*paths, PREVIEW] if url else paths)
    if url:
        (out / PREVIEW).write_bytes(preview.picture(site.reading))
    for done, path in enumerate(paths, start=1):
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(site.render(path) or "", encoding="utf-8", errors="replace")
        on_page(done, len(paths))
    return out / "index.html"


def _forget_pages(out: Path, paths: Sequence[str]) -> None:
    """Removes files that only an earlier report wrote, and lists those of this one."""
    manifest = out / MANIFEST
    try:
        earlier = set(manifest.read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        earlier = set()
    for path in earlier - set(paths):
        # An edited list must not make us remove files outside the report.
        if (out / path).resolve().is_relative_to(out.resolve()):
            (out / path).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    manifest.write_text("\n".join(paths) + "\n", encoding="utf-8")
