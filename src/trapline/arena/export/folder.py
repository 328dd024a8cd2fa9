"""The folder of an export: empty, or one that an earlier export of the same format wrote."""

from pathlib import Path

from trapline.arena import output_paths
from trapline.arena.errors import UsageError

#: Lies in every exported folder and names its format.
MARKER = ".trapline-export"


def claim(out: Path, form: str) -> None:
    """Marks the folder as ours; refuses one with other files or with another export."""
    marker = out / MARKER
    if marker.is_file():
        found = marker.read_text(errors="replace", encoding="utf-8").strip()
        if found != form:
            raise UsageError(
                f"{out} holds an export with --format {found}; give --format {form} another --out"
            )
        return
    output_paths.refuse_foreign(out, [MARKER], "export")
    output_paths.made(out, "an export")
    marker.write_text(f"{form}\n", encoding="utf-8")
