"""`trapline generate --speculate`: drafted tokens in one colour, the target's own in another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer

How = Literal["dflash", "ddtree", "lookup"]
#: Tokens that were drafted and accepted, and those that the target added itself.
DRAFTED, BONUS = typer.colors.GREEN, typer.colors.YELLOW


@dataclass(frozen=True)
class Speculation:
    """How to draft: a chain or a tree of a DFlash drafter, or what the text said before."""

    how: How
    #: The drafter's folder; `drafter` inside the model's if not given.
    drafter: Path | None
    #: Drafted tokens a pass.
    budget: int

    def parts(self, decoder: Any, model: Path) -> tuple[Any, Any]:
        """Target and drafter as generation takes them."""
        from trapline.gold.tree_decoding import checkpoint
        from trapline.gold.tree_decoding.decoder_target import DecoderTarget
        from trapline.gold.tree_decoding.drafter import DFlashDrafter
        from trapline.gold.tree_decoding.prompt_lookup import PromptLookup

        drafter: Any
        if self.how == "lookup":
            drafter = PromptLookup(decoder.config.vocab, block=self.budget, device=decoder.device)
        else:
            weights = checkpoint.load(
                self.drafter or model / "drafter",
                dtype=decoder.norm.weight.dtype,
                device=decoder.device,
            )
            drafter = DFlashDrafter(weights, decoder)
        return DecoderTarget(decoder, drafter.target_layers), drafter


def speculate(
    speculation: Speculation,
    decoder: Any,
    model: Path,
    prompt: list[int],
    *,
    decode: Callable[[list[int]], str],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    stop_texts: Sequence[str],
    sampling: Any,
) -> int:
    """Shows the answer as it comes; how many tokens it has."""
    from trapline.gold.decoder.text import TextStream
    from trapline.gold.tree_decoding.generate import stream
    from trapline.gold.tree_decoding.statistics import Statistics

    target, drafter = speculation.parts(decoder, model)
    text, statistics = TextStream(decode, stop_texts), Statistics()
    for burst in stream(
        target,
        drafter,
        [prompt],
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        mode="tree" if speculation.how == "ddtree" else "chain",
        budget=speculation.budget,
        statistics=statistics,
    ):
        for place, token in enumerate(burst.tokens):
            colour = DRAFTED if place < burst.drafted else BONUS
            typer.secho(text.push(token), fg=colour, nl=False)
        if text.stopped:
            break
    typer.secho(text.finish(), fg=BONUS)
    _summary(statistics)
    return statistics.tokens


def _summary(statistics: Any) -> None:
    by_depth = " ".join(f"{share:.2f}" for share in statistics.acceptance_by_depth())
    typer.echo(
        f"τ = {statistics.tau:.2f} tokens a pass ({statistics.tokens} tokens, "
        f"{statistics.passes} passes, {statistics.drafted} drafted)",
        err=True,
    )
    if by_depth:
        typer.echo(f"accepted by depth: {by_depth}", err=True)
    total = sum(statistics.seconds.values())
    split = ", ".join(f"{part} {taken / total:.0%}" for part, taken in statistics.seconds.items())
    typer.echo(f"time: {split}", err=True)
