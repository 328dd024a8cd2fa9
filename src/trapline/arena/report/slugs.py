"""File names for pages, from names that a submission chose."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable

_SAFE = re.compile(r"[a-z0-9]+(?:[-_.][a-z0-9]+)*")
_LONGEST = 48


def slug(text: str) -> str:
    """A safe file name; the text itself if it is one already.

    A changed name gets a digest of the original, so that two names never share a file.
    Two separators never follow each other inside, so "--" can join slugs.
    """
    if len(text) <= _LONGEST and _SAFE.fullmatch(text):
        return text
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = "-".join(re.findall(r"[a-z0-9]+", plain))[:_LONGEST].strip("-")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{words}-{digest}" if words else digest


def assign(names: Iterable[str]) -> dict[str, str]:
    """One slug per name, all different, even if a name imitates another's slug."""
    taken: set[str] = set()
    chosen = {}
    for name in sorted(set(names)):
        candidate, count = slug(name), 1
        while candidate in taken:
            count += 1
            candidate = f"{slug(name)}.{count}"
        taken.add(candidate)
        chosen[name] = candidate
    return chosen
