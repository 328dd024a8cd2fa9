"""The options about isolation that several verbs share."""

from typing import Annotated

import typer

from trapline.arena.record import Level

_EXACTLY = "Use exactly this level, instead of the strongest that the machine offers."
_REFUSE = "Refuse a weaker level (exit code 3)."
Isolation = Annotated[Level | None, typer.Option(help=_EXACTLY)]
Required = Annotated[Level | None, typer.Option("--require-isolation", help=_REFUSE)]
