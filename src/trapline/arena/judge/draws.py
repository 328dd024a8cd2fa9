"""Which situations an answer meets: the seeds, their two halves, and the key that they come from.

A seed is the first part of the key of every random stream: streams of different seeds are
independent. Unless one is given, an answer's seed is an HMAC of the challenge and of the answer's
bytes with a secret key: the same bytes meet the same situations in every run, and changed bytes
meet others, so that no feedback tells which situations come next.

Training environments and ordinary runs draw from the public half of the seeds. A held-out run draws
from the other one, so that no situation in it was met in training.
"""

import hmac
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile

from trapline.arena.challenge import Challenge
from trapline.arena.errors import UsageError

_BITS = 32
#: Public seeds lie below; held-out ones from here to twice this.
PUBLIC_SEEDS = 1 << _BITS
_KEY_BYTES = 32


@dataclass(frozen=True)
class DrawKey:
    secret: bytes
    #: Why it is not kept, so that another process draws other situations; empty if it is kept.
    not_kept: str = ""

    def seed(self, challenge: Challenge, submission_digest: str, *, held_out: bool = False) -> int:
        half = "held-out" if held_out else "public"
        drawn_for = "\n".join((half, challenge.full_id, challenge.digest, submission_digest))
        drawn = hmac.digest(self.secret, drawn_for.encode(), "sha256")
        return int.from_bytes(drawn[: _BITS // 8]) + (PUBLIC_SEEDS if held_out else 0)


@cache
def draw_key() -> DrawKey:
    """The key of this machine's user, made when first needed; one for this process where the state
    folder cannot keep it."""
    try:
        return DrawKey(_kept_secret(_key_path()))
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        return DrawKey(secrets.token_bytes(_KEY_BYTES), not_kept=reason)


def _key_path() -> Path:
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # absent, or not valid by the specification
        home = Path(os.path.expanduser("~"))
        if not home.is_absolute():
            raise FileNotFoundError("the user has no home folder")
        base = home / ".local" / "state"
    return base / "trapline" / "draw-key"


def _kept_secret(path: Path) -> bytes:
    """The file's secret, written first where there is none; all processes get the same one."""
    if not path.is_file():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, prefix="draw-key-") as file:  # of mode 0600
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            with suppress(FileExistsError):  # another process was faster
                os.link(file.name, path)
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} must be a file that only this user can read")
    secret = path.read_bytes()
    if len(secret) != _KEY_BYTES:
        raise OSError(f"{path} has {len(secret)} bytes instead of {_KEY_BYTES}: delete it")
    return secret


def is_held_out(seed: int) -> bool:
    return seed >= PUBLIC_SEEDS


def public_seed(seed: int | None) -> int:
    """The given seed, or a random one; a held-out one is refused."""
    if seed is None:
        return secrets.randbits(_BITS)
    if not 0 <= seed < PUBLIC_SEEDS:
        raise UsageError(f"a seed is a number from 0 to {PUBLIC_SEEDS - 1}, not {seed}")
    return seed
