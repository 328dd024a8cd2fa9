"""`trapline sign`: signs the evidence bundles of a run."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from trapline.arena.errors import UsageError
from trapline.arena.runs.signing import bundle_files, make_key, minisign, read_secret_key
from trapline.arena.runs.signing import sign as sign_files

EXAMPLE = "trapline sign --new-key trapline.key; trapline sign runs/field --key trapline.key"
#: The password of the secret key, where nothing can ask for it.
PASSWORD = "TRAPLINE_KEY_PASSWORD"  # noqa: S105 - the name of a variable


def sign(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a run, or the file of a bundle.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="minisign secret key to sign with.")] = None,
    new_key: Annotated[
        Path | None,
        typer.Option(help="Make a key instead: writes this file and, beside it, FILE.pub."),
    ] = None,
) -> None:
    """Sign evidence bundles with a minisign key; `trapline verify` checks them.

    The password of the key is asked for, or taken from TRAPLINE_KEY_PASSWORD.
    """
    if new_key is not None:
        if run is not None or key is not None:
            raise UsageError("--new-key only makes a key: leave out the run and --key")
        question = f"password of the new key {new_key} (empty for none)"
        public = make_key(new_key, lambda: _password(question, confirm=True))
        print(f"secret key: {new_key}\npublic key: {public}")
        return
    if run is None or key is None:
        raise UsageError("sign needs a run and --key FILE; --new-key FILE makes a key")
    files, secret = bundle_files(run), read_secret_key(key)
    _unlock(secret, key)
    count = sum(1 for _ in sign_files(files, secret))
    print(f"signed {count} {'bundle' if count == 1 else 'bundles'}")


def _unlock(secret: Any, path: Path) -> None:
    if not secret.is_encrypted():
        return
    try:
        secret.decrypt(_password(f"password of {path}"))
    except minisign().Error as error:
        raise UsageError(f"{path} cannot be used: {error}") from None


def _password(question: str, *, confirm: bool = False) -> str:
    """From the environment, or asked for; a new key may do without."""
    given = os.environ.get(PASSWORD)
    if given is not None:
        return given
    default = "" if confirm else None
    answer: str = typer.prompt(
        question, hide_input=True, confirmation_prompt=confirm, default=default, show_default=False
    )
    return answer
