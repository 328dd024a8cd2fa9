"""`trapline reproduce`: writes the failing call of a finding as a program of its own."""

from pathlib import Path
from typing import Annotated

import typer

from trapline.arena import output_paths
from trapline.arena.errors import UsageError
from trapline.arena.gpu import reproduction as gpu_reproduction
from trapline.arena.judge.intake import Intake, from_texts
from trapline.arena.judge.reproduction import DATA, SCRIPT, write_script
from trapline.arena.profile import ADAPTER, CUDA_ADAPTER
from trapline.arena.record import Bundle, Finding
from trapline.arena.runs.replay import calls_again
from trapline.arena.runs.run import choose_level
from trapline.cli.replay import read_evidence

_OURS = ((SCRIPT,), (DATA,))
EXAMPLE = "trapline reproduce 3f2a 1 --run runs/demo --out bug"


def reproduce(
    cell: Annotated[
        str, typer.Argument(help="File of an evidence bundle; with --run, its digest or a prefix.")
    ],
    finding: Annotated[
        str, typer.Argument(help="Number of the finding, from 1, or its cause.")
    ] = "1",
    run: Annotated[
        str | None,
        typer.Option(help="Folder or postgresql:// URL of the run that holds the bundle."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")] = Path(
        "reproduction"
    ),
    traps: Annotated[
        Path | None,
        typer.Option(help="The private trap set that graded it, for calls that are made again."),
    ] = None,
) -> None:
    """Write the answer, its failing call and a short script that runs without the grader."""
    bundle = read_evidence(cell, run)
    chosen = _chosen(bundle, finding)
    check, is_gpu = chosen.explains[0], bundle.cell.track == "gpu"
    calls = bundle.raw.get("calls", {}).get(check, [])
    if not calls and not is_gpu:
        print(f"the calls of {check} are too large for evidence: they are made again", flush=True)
        calls = calls_again(bundle, check, choose_level(), traps)
    if not calls:
        raise UsageError(
            f"the calls of {check} were not kept or hold an object of the grader; "
            f"`trapline replay` runs them again: {chosen.call}"
        )
    if output_paths.folder(out, "the reproduction").is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; --out names a new folder")
    out.mkdir(parents=True, exist_ok=True)
    _own_files(bundle).write(out)
    title = f"{chosen.cause}: {chosen.sentence}"
    message = _message(bundle, check)
    if is_gpu:
        module, cuda = _answer_of(bundle)
        gpu_reproduction.write_script(out, title, calls, module, cuda, message)
    else:
        adapted = bool(bundle.cell.profile) and ADAPTER in bundle.files
        module = Path(ADAPTER).stem if adapted else "solution"
        write_script(out, title, calls, module, message)
    print(f"{chosen.cause} ({chosen.certainty}): {chosen.sentence}")
    print(f"run it: cd {out} && python reproduce.py")


def _message(bundle: Bundle, check: str) -> str:
    """What the check said in the grade."""
    said = (one.message for one in (*bundle.cell.cases, *bundle.cell.traps) if one.id == check)
    return next(said, "")


def _answer_of(bundle: Bundle) -> tuple[str, bool]:
    """The module with the entry points of a GPU answer, and whether it is CUDA C++."""
    adapted = bool(bundle.cell.profile) and CUDA_ADAPTER in bundle.files
    module = Path(CUDA_ADAPTER).stem if adapted else "solution"
    return module, f"{module}.py" not in bundle.files


def _own_files(bundle: Bundle) -> Intake:
    """The submission's files, without any in the place of ours."""
    files = from_texts(bundle.files, bundle.binary_files).files
    return Intake({name: text for name, text in files.items() if Path(name).parts[:1] not in _OURS})


def _chosen(bundle: Bundle, wanted: str) -> Finding:
    findings = bundle.cell.findings
    if not findings:
        raise UsageError("this cell has no findings")
    if wanted.isdigit() and 1 <= int(wanted) <= len(findings):
        return findings[int(wanted) - 1]
    for finding in findings:
        if finding.cause == wanted:
            return finding
    known = ", ".join(f"{n} ({f.cause})" for n, f in enumerate(findings, 1))
    raise UsageError(f"unknown finding {wanted!r}; the findings of this cell are: {known}")
