"""`trapline generate --speculate`: builds the drafter and prints what drafting saved."""

from pathlib import Path
from typing import Any, Literal

import typer

How = Literal["dflash", "ddtree", "lookup"]
#: Colours of tokens that were drafted and accepted, and of those that the target added.
DRAFTED, BONUS = typer.colors.GREEN, typer.colors.YELLOW


def speculation(how: How, drafter: Path, budget: int, decoder: Any) -> Any:
    """A `Speculation`: a chain or a tree of a DFlash drafter, or prompt lookup."""
    from trapline.gold.tree_decoding.speculation import Speculation

    mode: Literal["tree", "chain"] = "tree" if how == "ddtree" else "chain"
    if how == "lookup":
        return Speculation("lookup", mode=mode, budget=budget)
    return Speculation.from_pretrained(drafter, decoder, mode=mode, budget=budget)


def show_statistics(statistics: Any) -> None:
    """How many tokens a pass gave, how deep drafts were accepted, and where time went."""
    by_depth = " ".join(f"{share:.2f}" for share in statistics.acceptance_by_depth())
    typer.echo(
        f"τ = {statistics.tau:.2f} tokens a pass ({statistics.tokens} tokens, "
        f"{statistics.passes} passes, {statistics.drafted} drafted), {statistics.served_by}",
        err=True,
    )
    if by_depth:
        typer.echo(f"accepted by depth: {by_depth}", err=True)
    if total := sum(statistics.seconds.values()):
        parts = (f"{part} {taken / total:.0%}" for part, taken in statistics.seconds.items())
        typer.echo(f"time: {', '.join(parts)}", err=True)
