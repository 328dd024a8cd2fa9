"""`trapline memory`: how much context of a model fits on a GPU, with every term of the sum."""

import json
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from trapline.arena.errors import UsageError
from trapline.gold.errors import RangeError
from trapline.gold.kv_cache.memory import (
    UNITS,
    Answer,
    Gpu,
    ModelShape,
    Setting,
    Unit,
    context_on,
    decoding_step,
    gpus,
    growth,
    models,
)


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        epilog="Example: trapline memory llama-3.1-8b --gpu h100-80 --gpu rtx-4090 --kv-bits 8",
    )(memory)


def memory(
    model: Annotated[
        str | None, typer.Argument(help="A model's name; leave it out to list models and GPUs.")
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Only this GPU; repeatable. All of them if not given.")
    ] = None,
    kv_bits: Annotated[float, typer.Option(help="Bits an element of the cache.")] = 16,
    weight_bits: Annotated[float, typer.Option(help="Bits a weight.")] = 16,
    utilization: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    reserve_gib: Annotated[float, typer.Option(help="GiB kept for activations.")] = 0.0,
    unit: Annotated[str, typer.Option(help="How to read a vendor's GB: gib or gb.")] = "gib",
    block_size: Annotated[int, typer.Option(help="Positions a page.")] = 16,
    sequences: Annotated[int, typer.Option(help="Sequences that share the memory.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say how many tokens of KV cache fit beside a model's weights."""
    if model is None:
        _list(as_json)
        return
    shape = _find("model", model, models())
    chosen = [_find("GPU", name, gpus()) for name in gpu or gpus()]
    try:
        setting = Setting(
            kv_bits=kv_bits,
            weight_bits=weight_bits,
            utilization=utilization,
            reserve_gib=reserve_gib,
            unit=cast(Unit, unit),
            block_size=block_size,
            sequences=sequences,
        )
    except RangeError as error:
        raise UsageError(str(error)) from None
    answers = [(one, context_on(shape, one, setting)) for one in chosen]
    if as_json:
        print(json.dumps(_describe(shape, setting, answers)))
    else:
        _print(shape, setting, answers)


def _find(what: str, name: str, known: dict[str, Any]) -> Any:
    if name.lower() not in known:
        raise UsageError(f"no {what} {name!r}; there are: {', '.join(known)}")
    return known[name.lower()]


def _list(as_json: bool) -> None:
    if as_json:
        rows = {
            "models": [asdict(one) for one in models().values()],
            "gpus": [asdict(one) for one in gpus().values()],
        }
        print(json.dumps(rows))
        return
    console = Console()
    table = Table("model", "parameters", "layers", "bytes a token (16 bit)", "source")
    for one in models().values():
        full = one.layers - one.sliding_layers
        layers = f"{full} + {one.sliding_layers} sliding" if one.sliding_layers else str(full)
        a_token = f"{one.layer_bytes(16) * full:,.0f}"
        table.add_row(one.name, f"{one.parameters:g} B", layers, a_token, one.source)
    console.print(table)
    table = Table("GPU", "memory", "GB/s", "TFLOP/s")
    for gpu in gpus().values():
        table.add_row(gpu.name, str(gpu.memory), f"{gpu.bandwidth:g}", f"{gpu.tflops:g}")
    console.print(table)


def _describe(
    shape: ModelShape, setting: Setting, answers: list[tuple[Gpu, Answer]]
) -> dict[str, Any]:
    grown = [{"tokens": n, "bytes": size} for n, size in growth(shape, setting.kv_bits)]
    found = []
    for gpu, answer in answers:
        step = decoding_step(shape, gpu, setting, min(answer.tokens, shape.context))
        found.append({**asdict(answer), "step": asdict(step)})
    return {
        "model": asdict(shape),
        "setting": asdict(setting),
        "growth": grown,
        "answers": found,
    }


def _print(shape: ModelShape, setting: Setting, answers: list[tuple[Gpu, Answer]]) -> None:
    console = Console()
    console.print(
        f"[bold]{shape.name}[/bold] ({shape.source}): tokens = "
        f"({setting.utilization:g} × memory − weights − reserve) / bytes a token; "
        f"1 GB = {UNITS[setting.unit]:,} bytes, {setting.weight_bits:g} bit weights, "
        f"{setting.kv_bits:g} bit cache, reserve {setting.reserve_gib:g} GiB, "
        f"{setting.sequences} sequence(s), pages of {setting.block_size}. "
        "Sizes in GiB; a step is a lower bound, and says what bounds it.",
        highlight=False,
    )
    table = Table("GPU", "usable", "weights", "cache", "tokens", "in pages", "a step there")
    for gpu, answer in answers:
        context = min(answer.tokens, shape.context)
        table.add_row(
            answer.gpu,
            _gib(answer.usable_bytes),
            _gib(answer.weight_bytes),
            _gib(answer.budget_bytes),
            f"{answer.tokens:,}" + (" *" if answer.tokens > shape.context else ""),
            f"{answer.tokens_in_blocks:,}",
            _step(shape, gpu, setting, context),
        )
    console.print(table)
    first = answers[0][1]
    sliding = f", and {first.sliding_bytes:,.0f} for full windows" if first.sliding_bytes else ""
    console.print(
        f"A token takes {first.bytes_per_token:,.0f} bytes{sliding}. "
        f"* more than the model's own context of {shape.context:,}.",
        highlight=False,
    )
    for tokens, size in growth(shape, setting.kv_bits):
        console.print(f"  {tokens:>9,} tokens  {_gib(size):>8} GiB", highlight=False)


def _step(shape: ModelShape, gpu: Gpu, setting: Setting, context: int) -> str:
    if context == 0:
        return "–"
    step = decoding_step(shape, gpu, setting, context)
    bound = "memory" if step.memory_bound else "arithmetic"
    return f"≥ {step.milliseconds:.2f} ms ({bound})"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"
