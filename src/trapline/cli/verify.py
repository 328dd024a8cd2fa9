"""`trapline verify`: checks digests and signatures of evidence bundles."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.runs.signing import PROOFS, bundle_files, missing, read_public_key
from trapline.arena.runs.signing import verify as verify_bundles
from trapline.cli.exit_codes import NOT_HELD

EXAMPLE = "trapline verify runs/field --public-key trapline.key.pub"
WORDS = {
    "signed": "signed with this key",
    "unchecked": "digest holds; the signature was not checked (give --public-key)",
    "digest": "digest holds; not signed",
    "forged": "the signature does not hold",
    "changed": "changed",
    "missing": "missing",
}


def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or the file of a bundle.")],
    public_key: Annotated[
        str | None,
        typer.Option(help="File or text of the minisign public key that must have signed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that evidence bundles are all there and unchanged, and who signed them.

    Exit code 4: a bundle was changed or is gone from its run, or with --public-key is not signed
    with this key.
    """
    key = read_public_key(public_key) if public_key else None
    found = list(missing(run))
    if not found or any((run / "bundles").glob("*.json")):
        found += verify_bundles(bundle_files(run), key)
    counts = Counter(one.proof for one in found)
    if as_json:
        print(json.dumps({"counts": counts, "bundles": [one.model_dump() for one in found]}))
    else:
        for proof in PROOFS:
            if counts[proof]:
                print(f"{counts[proof]} of {len(found)} bundles: {WORDS[proof]}")
        for one in found:
            if one.reason:
                print(f"  {one.bundle}: {one.reason}")
    if any(one.proof in ("changed", "forged", "missing") for one in found) or (
        public_key and counts["digest"]
    ):
        raise typer.Exit(NOT_HELD)
