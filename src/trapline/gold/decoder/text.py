"""Tokens to text as they come: complete characters only, and no part of a stop string."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from trapline.gold.decoder.chat import ChatTemplate, read_templates
from trapline.gold.errors import DTypeError, RangeError

Decode = Callable[[list[int]], str]
#: What tokenizers return for the bytes of an incomplete character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Codec(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Stop strings, of which one may be given by itself."""
    given = (stop,) if isinstance(stop, str) else stop
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise DTypeError(f"stop must be a text or a list of texts, got {stop!r}")
    if "" in given:
        raise RangeError("a stop string cannot be empty")
    return tuple(given)


class TextStream:
    """The text of one growing answer, up to the first stop string."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        if isinstance(stops, str):
            raise RangeError(f"stop strings must be a list: [{stops!r}], not {stops!r}")
        self._decode, self._stops = decode, stop_strings(stops)
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is final now. Sets `stopped` at a stop string."""
        self._tokens.append(token)
        if not self.stopped:
            self._held += self._decoded(final=False)
        return self._release(final=False)

    def finish(self) -> str:
        """Returns the text held back so far: there are no more tokens."""
        if not self.stopped:
            self._held += self._decoded(final=True)
        return self._release(final=True)

    def _decoded(self, *, final: bool) -> str:
        """New text. Decodes a few earlier tokens again, because spacing depends on them."""
        before = self._decode(self._tokens[self._start : self._read])
        now = self._decode(self._tokens[self._start :])
        if now.endswith(_INCOMPLETE) and not final:
            return ""
        if len(now) > len(before):
            # Tokens without text stay in the window, or the word after them would lose its space.
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
        """Length of the longest end of the text that may begin a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0


class Tokenizer:
    """A checkpoint's `tokenizer.json` and its chat template."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        from tokenizers import Tokenizer as Rust

        try:
            self._tokenizer = Rust.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise RangeError(f"{path} is not a tokenizer file: {error}") from None
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=True)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The checkpoint's chat template; assign another one to replace it."""
        return read_templates(self._folder)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant goes on.

        The template writes the special tokens itself. A last message of the assistant is continued.
        """
        last = messages[-1] if messages else {}
        continues = isinstance(last, Mapping) and last.get("role") == "assistant"
        text = self.chat_template(
            messages, add_generation_prompt=not continues, continue_final_message=continues
        )
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a command line with bytes outside UTF-8
            raise RangeError(f"the prompt is not valid UTF-8 (character {error.start})") from None
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def find(self, token: str) -> int:
        """The id of a token by its name."""
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise RangeError(f"the tokenizer has no token {token!r}")
        return int(number)


def end_ids(folder: str | Path) -> list[int]:
    """Stop tokens of a checkpoint: from `generation_config.json`, else from `config.json`."""
    folder = Path(folder)
    for name in ("generation_config.json", "config.json"):
        said = _json(folder / name).get("eos_token_id")
        if said is not None:
            ends = said if isinstance(said, list) else [said]
            if not all(type(end) is int for end in ends):
                raise RangeError(
                    f"eos_token_id of {folder / name} must be an integer or a list of integers, "
                    f"got {said!r}"
                )
            return ends
    return []


def save_ends(folder: str | Path, ends: Sequence[int]) -> None:
    """Writes stop tokens to `generation_config.json`, which `end_ids` reads first."""
    if ends:
        said = json.dumps({"eos_token_id": ends[0] if len(ends) == 1 else list(ends)})
        (Path(folder) / "generation_config.json").write_text(said + "\n", encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RangeError(f"{path} is not valid JSON: {error}") from None
    return found if isinstance(found, dict) else {}
