"""`trapline export`: tasks, logs and predictions for other tools."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from trapline.arena import output_paths
from trapline.arena.challenge import Challenge, load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.export.eval_logs import Run, write_eval_logs
from trapline.arena.export.folder import claim
from trapline.arena.export.harbor import check_images, write_tasks
from trapline.arena.export.hf_kernels import write_kernels
from trapline.arena.export.inspect_package import write_package
from trapline.arena.export.nemo_gym import write_nemo_gym
from trapline.arena.export.openenv import write_openenv
from trapline.arena.export.predictions import write_predictions
from trapline.arena.export.verifiers_package import write_verifiers
from trapline.arena.runs.field import find_entries
from trapline.cli.reading import opened

EXAMPLE = "trapline export --format harbor --challenge kv_cache"
Format = Literal[
    "harbor", "inspect", "verifiers", "nemo-gym", "openenv", "hf-kernels", "eval", "predictions"
]
#: What exports challenges, by its format.
_CHALLENGES: dict[str, Callable[[list[Challenge], Path], list[Path]]] = {
    "harbor": write_tasks,
    "inspect": write_package,
    "verifiers": write_verifiers,
    "nemo-gym": write_nemo_gym,
    "openenv": write_openenv,
}
_DEFAULT_OUT = {
    "harbor": "harbor-tasks",
    "inspect": "inspect-tasks",
    "verifiers": "verifiers-environments",
    "nemo-gym": "nemo-gym",
    "openenv": "openenv",
    "hf-kernels": "hf-kernels",
    "eval": "logs",
    "predictions": "predictions.jsonl",
}


def export(
    source: Annotated[
        str | None,
        typer.Argument(help="For eval: a run (default: the last). For predictions: a field."),
    ] = None,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="Task folders; a package for `inspect eval`; training environments; kernel "
            "repositories; a run's .eval logs; JSON lines.",
        ),
    ] = "harbor",
    out: Annotated[Path | None, typer.Option(help="The folder, or the JSON-lines file.")] = None,
    challenge: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    images: Annotated[
        str | None,
        typer.Option(
            help="For harbor: registry and owner of the images, such as ghcr.io/me (default: "
            "localhost, this machine only)."
        ),
    ] = None,
) -> None:
    """Write files for other tools.

    harbor: one task folder per challenge; the verifier is our grader in its own container.
    Its tasks name images: build-images.sh builds them, and pushes them if --images is given.
    inspect: a folder for `inspect eval`, with our grader as the scorer.
    verifiers: an environment package per challenge and one for all, for training and evaluation.
    nemo-gym: a resources server for NeMo Gym. openenv: an environment for OpenEnv.
    hf-kernels: the library's kernels as repositories for Hugging Face's `kernels`.
    eval: a run as logs for `inspect view`.
    predictions: a field as patches against the starters; `solve --from-predictions` reads them.
    """
    target = out or Path(_DEFAULT_OUT[form])
    if form == "predictions":
        output_paths.file(target, "a list of predictions")
    else:
        output_paths.folder(target, "an export")
    names = challenge or []
    if images is not None:
        if form != "harbor":
            raise UsageError("--images needs --format harbor: only its tasks name images")
        check_images(images)
    if form in _CHALLENGES:
        _export_challenges(form, source, names, target, images)
    elif form == "hf-kernels":
        if source is not None or names:
            raise UsageError("--format hf-kernels exports the library; remove run and --challenge")
        claim(target, form)
        _print_paths(write_kernels(target))
    elif form == "eval":
        _export_run(source, names, target)
    else:
        if source is None:
            raise UsageError("--format predictions needs the field to export")
        count = write_predictions(find_entries(Path(source), names), target)
        print(f"{target}: {count} predictions")


def _export_challenges(
    form: str, source: str | None, names: list[str], target: Path, images: str | None
) -> None:
    if source is not None:
        raise UsageError(f"--format {form} exports challenges; remove the run or field")
    chosen = [load(one) for one in dict.fromkeys(names or load_all())]
    write = _CHALLENGES[form] if images is None else partial(write_tasks, images=images)
    claim(target, form)
    _print_paths(write(chosen, target))


def _print_paths(paths: list[Path]) -> None:
    for path in paths:
        print(path)


def _export_run(source: str | None, names: list[str], target: Path) -> None:
    wanted = [load(one).id for one in names]
    with opened(source) as store:
        cells = [cell for cell in store.cells() if not wanted or cell.challenge in wanted]
        run = Run(store.name, cells, load_all(), store.bundle)
        _print_paths(write_eval_logs(run, target))
