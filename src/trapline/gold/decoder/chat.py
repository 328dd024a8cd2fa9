"""Chat templates: a conversation as the text that a model was trained on.

Renders what `apply_chat_template` of transformers renders, from the same files. A template comes
with a checkpoint and may be hostile: it runs in jinja2's sandbox and sees JSON values only.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trapline.gold.decoder.config_values import read_table
from trapline.gold.errors import DTypeError, RangeError

#: Marks the end of the message that is to be continued. The trailing space shows whether the
#: template trims messages.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}continued\N{OBJECT REPLACEMENT CHARACTER} "


class ChatTemplate:
    """Templates by name ("default", "tool_use") and the special tokens that they may use."""

    def __init__(
        self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._sources, self._special_tokens = named, dict(special_tokens or {})
        environment = _environment()
        self._templates = {}
        for name, source in named.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateSyntaxError as error:
                raise RangeError(
                    f"the chat template is not valid jinja (line {error.lineno}): {error.message}"
                ) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made from the sources: compiled templates have neither."""
        return ChatTemplate, (self._sources, self._special_tokens)

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        It ends where the assistant's answer begins, or with `continue_final_message` inside the
        last message. `tools` are JSON schemas; further variables go to the template.
        """
        conversation = _checked(messages)
        if add_generation_prompt and continue_final_message:
            raise RangeError("give add_generation_prompt or continue_final_message, not both")
        if continue_final_message:
            _mark_end(conversation[-1])
        known = {
            **self._special_tokens,
            **variables,
            "messages": conversation,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._chosen(tools is not None).render(_plain(known))
        # A template is a program: besides its own errors it can divide by zero or recurse.
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RangeError(f"the chat template refuses these messages: {error}") from None
        except RecursionError:
            raise RangeError("the chat template recurses without end") from None
        return _cut_at_mark(text) if continue_final_message else text

    def _chosen(self, with_tools: bool) -> Any:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise RangeError(
                f"the checkpoint has no default chat template, only {sorted(self._templates)}"
            )
        return self._templates["default"]


def read_templates(folder: str | Path) -> ChatTemplate:
    """`chat_template.jinja`, `additional_chat_templates/`, or else `tokenizer_config.json`."""
    folder = Path(folder)
    found: dict[str, str] = {}
    path = folder / "tokenizer_config.json"
    config = read_table(path) if path.is_file() else {}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if not found:
        found = _from_config(config.get("chat_template"), path)
    if not found:
        raise RangeError(
            f"{folder.name} has no chat template (chat_template.jinja or tokenizer_config.json): "
            "give text instead of messages"
        )
    path = folder / "special_tokens_map.json"
    return ChatTemplate(found, _special_tokens(config, read_table(path) if path.is_file() else {}))


def _from_config(said: Any, path: Path) -> dict[str, str]:
    if said is None:
        return {}
    if isinstance(said, str):
        return {"default": said}
    try:
        named = {one["name"]: one["template"] for one in said}
    except (TypeError, KeyError):
        named = {None: None}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise RangeError(f"chat_template of {path} must be a text or a list of named templates")
    return named


def _special_tokens(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and so on; each is a text or an object with a `content`."""
    found: dict[str, str] = {}
    for key, value in {**older, **config}.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; here it shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["namespace"] = _namespace
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Namespace(Namespace):
    """Variables of a template that loops may set; refuses names of Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template cannot set {name!r}")
        super().__setitem__(name, value)


def _namespace(*values: Any, **named: Any) -> _Namespace:
    made = _Namespace()
    for name, value in dict(*values, **named).items():
        made[str(name)] = value
    return made


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike jinja2's own filter, escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the messages made of plain values."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise DTypeError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise RangeError("a conversation needs at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DTypeError(
                f'message {number} must be like {{"role": "user", "content": "…"}}, got {message!r}'
            )
    plain: list[dict[str, Any]] = _plain(list(messages))
    return plain


def _plain(value: Any) -> Any:
    """The value made of JSON types alone: methods of other objects could do harm."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise DTypeError(f"chat messages hold JSON values, got {type(value).__name__}")


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
        return
    parts = content if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _MARK
            return
    raise RangeError("the last message has no text to continue")


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise RangeError("the chat template leaves out the message that is to be continued")
    return before if after.startswith(" ") else before.rstrip()
