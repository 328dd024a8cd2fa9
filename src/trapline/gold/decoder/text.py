"""From tokens to text while they come: whole characters, and never a piece of a stop string."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trapline.gold.errors import RangeError

#: What decoders put where a character's bytes are not complete.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one answer as it grows; ends where a stop string begins."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str):
            raise RangeError(f"stop strings come as a list: [{stops!r}], not {stops!r}")
        if "" in stops:
            raise RangeError("a stop string cannot be empty")
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that can be shown now. `stopped` says whether a stop string was completed."""
        self._tokens.append(token)
        if not self.stopped:
            self._held += self._decoded(final=False)
        return self._release(final=False)

    def finish(self) -> str:
        """What was held back in case a stop string would come."""
        if not self.stopped:
            self._held += self._decoded(final=True)
        return self._release(final=True)

    def _decoded(self, *, final: bool) -> str:
        """New text. A few tokens before it are decoded again: how one looks depends on them."""
        before = self._decode(self._tokens[self._start : self._read])
        now = self._decode(self._tokens[self._start :])
        if now.endswith(_INCOMPLETE) and not final:
            return ""
        if len(now) > len(before):
            # Tokens that show nothing stay in the window: a first word would lose its space.
            self._start, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def _release(self, *, final: bool) -> str:
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = 0 if final else self._possible_start()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _possible_start(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0


class Tokenizer:
    """The tokeniser that lies beside a checkpoint (`tokenizer.json`), and its ends."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        from tokenizers import Tokenizer as Rust

        try:
            self._tokenizer = Rust.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise RangeError(f"{path} is no tokeniser: {error}") from None

    def encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # bytes of a command line that are no UTF-8
            raise RangeError("the prompt is no text: it has bytes that are no UTF-8") from None
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def find(self, token: str) -> int:
        """The number of a token by its name."""
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise RangeError(f"the tokeniser has no token {token!r}")
        return int(number)


def end_ids(folder: Path) -> list[int]:
    """The ends that a checkpoint names: `generation_config.json` first, then `config.json`."""
    for name in ("generation_config.json", "config.json"):
        said = _json(folder / name).get("eos_token_id")
        if said is not None:
            ends = said if isinstance(said, list) else [said]
            if not all(type(end) is int for end in ends):
                raise RangeError(f"eos_token_id of {folder / name} is no token: {said!r}")
            return ends
    return []


def save_ends(folder: Path, ends: Sequence[int]) -> None:
    """The opposite: where `end_ids`, and transformers, find them first."""
    if ends:
        said = json.dumps({"eos_token_id": ends[0] if len(ends) == 1 else list(ends)})
        (folder / "generation_config.json").write_text(said + "\n")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise RangeError(f"{path} is no JSON: {error}") from None
    return found if isinstance(found, dict) else {}
