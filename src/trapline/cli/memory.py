"""`trapline memory`: how much context of a model fits on a GPU, term by term."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import typer
from rich.console import Console
from rich.table import Table

from trapline.arena.errors import MissingError, UsageError
from trapline.cli.asked import is_written
from trapline.gold.decoder.model_shape import model_shape
from trapline.gold.errors import RangeError
from trapline.gold.hub import is_hub_id
from trapline.gold.kv_cache.memory import (
    Answer,
    context_on,
    decoding_step,
    growth,
    latency,
    plot_growth,
    saved,
)
from trapline.gold.kv_cache.shapes import (
    UNITS,
    Gpu,
    ModelShape,
    Setting,
    Unit,
    find_model,
    gpus,
    models,
)

EXAMPLE = "trapline memory llama-3.1-8b --gpu h100-80 --gpu rtx-4090 --kv-bits 8"


def memory(
    called: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="For example llama-3-8b, a Hugging Face id or a checkpoint folder; "
            "omit it for a list."
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(help="Only this GPU; repeatable. Default: all.")
    ] = None,
    kv_bits: Annotated[float, typer.Option(help="Bits per element of the cache.")] = 16,
    weight_bits: Annotated[float, typer.Option(help="Bits per weight.")] = 16,
    utilization: Annotated[float, typer.Option(help="Usable share of the memory.")] = 0.9,
    reserve_gib: Annotated[float, typer.Option(help="GiB kept for activations.")] = 0.0,
    unit: Annotated[str, typer.Option(help="A vendor's GB: gib (2³⁰) or gb (10⁹).")] = "gib",
    block_size: Annotated[int, typer.Option(help="Positions per page.")] = 16,
    sequences: Annotated[int, typer.Option(help="Sequences that share the memory.")] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt, for times and FLOPs.")] = 1024,
    new: Annotated[int, typer.Option(help="New tokens, for times and FLOPs.")] = 100,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of the cache's growth here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Calculate how many tokens of KV cache fit beside a model's weights."""
    if model is None:
        _refuse_unused(called)
        _list(as_json)
        return
    chosen = [_find_gpu(name) for name in gpu or gpus()]
    try:
        shape = _shape(model)
        setting = Setting(
            kv_bits=kv_bits,
            weight_bits=weight_bits,
            utilization=utilization,
            reserve_gib=reserve_gib,
            unit=cast(Unit, unit),
            block_size=block_size,
            sequences=sequences,
        )
        text = _Text(prompt, new)
        saved(shape, *text)
    except (RangeError, FileNotFoundError) as error:
        raise UsageError(str(error)) from None
    if plot is not None:
        _plot(shape, plot)
    answers = [(one, context_on(shape, one, setting)) for one in chosen]
    if as_json:
        print(json.dumps(_describe(shape, setting, answers, text)))
    else:
        _print(shape, setting, answers)
        _print_costs(shape, setting, answers, text)


def _shape(model: str) -> ModelShape:
    """A checkpoint folder, a known name, or else a Hub id, whose configuration is downloaded."""
    if not (Path(model) / "config.json").is_file():
        try:
            return find_model(model)
        except RangeError as unknown:
            if not is_hub_id(model):
                raise
            try:
                return model_shape(model)
            except FileNotFoundError as missing:
                raise UsageError(f"{unknown}; {missing}") from None
    return model_shape(model)


def _refuse_unused(called: typer.Context) -> None:
    """Refuses options that do not change the list."""
    for name in called.params:
        if is_written(called, name) and name not in ("model", "as_json"):
            raise UsageError(f"--{name.replace('_', '-')} needs a model: trapline memory MODEL")


class _Text(NamedTuple):
    prompt: int
    new: int


def _plot(shape: ModelShape, out: Path) -> None:
    try:
        plot_growth(shape, out)
    except ImportError:
        raise MissingError("plots need matplotlib: trapline[report]") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {out}: {error}") from None


def _find_gpu(name: str) -> Gpu:
    found = gpus().get(name.lower())
    if found is None:
        raise UsageError(f"unknown GPU {name!r}; there are: {', '.join(gpus())}")
    return found


def _list(as_json: bool) -> None:
    if as_json:
        rows = {
            "models": [asdict(one) for one in models().values()],
            "gpus": [asdict(one) for one in gpus().values()],
        }
        print(json.dumps(rows))
        return
    table = Table("model", "parameters", "layers", "bytes per token (16 bit)", "source")
    for one in models().values():
        full = one.layers - one.sliding_layers
        layers = f"{full} + {one.sliding_layers} sliding" if one.sliding_layers else str(full)
        a_token = f"{one.layer_bytes(16) * full:,.0f}"
        table.add_row(one.name, f"{one.parameters:g} B", layers, a_token, one.source)
    _show(table, "source")
    table = Table("GPU", "memory", "GB/s", "TFLOP/s")
    for gpu in gpus().values():
        table.add_row(gpu.name, str(gpu.memory), f"{gpu.bandwidth:g}", f"{gpu.tflops:g}")
    _show(table)


def _show(table: Table, *free: str) -> None:
    """Prints a table without truncating cells; cells of `free` columns may wrap."""
    for column in table.columns:
        if column.header in free:
            column.overflow = "fold"
        else:
            words = str(column.header).split()
            column.min_width = max(len(str(text)) for text in (*words, *column.cells))
    Console().print(table, crop=False)


def _describe(
    shape: ModelShape, setting: Setting, answers: list[tuple[Gpu, Answer]], text: _Text
) -> dict[str, Any]:
    grown = [{"tokens": n, "bytes": size} for n, size in growth(shape, setting.kv_bits)]
    found = []
    for gpu, answer in answers:
        step = decoding_step(shape, gpu, setting, min(answer.tokens, shape.context))
        times = asdict(latency(shape, gpu, setting, *text))
        found.append({**asdict(answer), "step": asdict(step), "latency": times})
    return {
        "model": asdict(shape),
        "setting": asdict(setting),
        "growth": grown,
        "saved": asdict(saved(shape, *text)),
        "answers": found,
    }


def _print(shape: ModelShape, setting: Setting, answers: list[tuple[Gpu, Answer]]) -> None:
    console = Console()
    console.print(
        f"[bold]{shape.name}[/bold] ({shape.source}): tokens = "
        f"({setting.utilization:g} × memory − weights − reserve) / bytes per token; "
        f"1 GB = {UNITS[setting.unit]:,} bytes, {setting.weight_bits:g} bit weights, "
        f"{setting.kv_bits:g} bit cache, reserve {setting.reserve_gib:g} GiB, "
        f"{setting.sequences} sequence(s), pages of {setting.block_size}. "
        "Sizes in GiB; the time of a step is a lower bound, with what bounds it.",
        highlight=False,
    )
    table = Table("GPU", "usable", "weights", "cache", "tokens", "in pages", "step at that context")
    for gpu, answer in answers:
        context = min(answer.tokens, shape.context)
        table.add_row(
            answer.gpu,
            _gib(answer.usable_bytes),
            _gib(answer.weight_bytes),
            _left(answer.budget_bytes),
            f"{answer.tokens:,}" + (" *" if answer.tokens > shape.context else ""),
            f"{answer.tokens_in_blocks:,}",
            _step(shape, gpu, setting, context),
        )
    _show(table)
    first = answers[0][1]
    sliding = f", and {first.sliding_bytes:,.0f} for full windows" if first.sliding_bytes else ""
    console.print(
        f"A token takes {first.bytes_per_token:,.0f} bytes{sliding}. "
        f"* more than the model's own context of {shape.context:,}.",
        highlight=False,
    )
    grown = list(growth(shape, setting.kv_bits))
    for tokens, size in grown:
        bar = "█" * max(1, round(40 * size / grown[-1][1]))
        console.print(f"  {tokens:>9,} tokens  {_gib(size):>8} GiB  {bar}", highlight=False)


def _left(budget: float) -> str:
    """The memory left by the weights, or how much is missing."""
    return _gib(budget) if budget >= 0 else f"{_gib(-budget)} short"


def _print_costs(
    shape: ModelShape, setting: Setting, answers: list[tuple[Gpu, Answer]], text: _Text
) -> None:
    """Prints what a cache saves and lower bounds of the times."""
    console = Console()
    save = saved(shape, *text)
    console.print(
        f"{text.prompt:,} + {text.new:,} tokens without a cache: {save.flops:.1f} × the FLOPs of "
        f"this model, {save.tokens:.1f} × the tokens, {save.scores:.1f} × the attention scores "
        f"({save.scores_at_final_length:.1f} × if every step is charged at the final length).",
        highlight=False,
    )
    if sum(text) > shape.context:
        beyond = f"{sum(text):,} tokens are beyond the model's context of {shape.context:,}."
        console.print(beyond, highlight=False)
    table = Table(
        "GPU",
        "FLOPs per byte",
        "of the GPU",
        "arithmetic-bound from",
        "prefill",
        "decode",
        "tokens/s",
    )
    for gpu, answer in answers:
        if answer.tokens >= text.prompt + text.new:
            step = decoding_step(shape, gpu, setting, text.prompt + text.new)
            times = latency(shape, gpu, setting, *text)
            enough = step.compute_bound_from
            table.add_row(
                gpu.name,
                f"{step.flops_per_byte:.1f}",
                f"{step.gpu_flops_per_byte:.0f}",
                "never" if enough is None else f"{enough:,} sequences",
                f"≥ {times.prefill_milliseconds:,.1f} ms",
                f"≥ {times.decode_milliseconds:,.1f} ms",
                f"≤ {times.tokens_per_second:,.0f}",
            )
    if table.row_count:
        _show(table)


def _step(shape: ModelShape, gpu: Gpu, setting: Setting, context: int) -> str:
    if context == 0:
        return "–"
    step = decoding_step(shape, gpu, setting, context)
    bound = "memory" if step.memory_bound else "arithmetic"
    return f"≥ {step.milliseconds:.2f} ms ({bound})"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"
