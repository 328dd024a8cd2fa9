"""A run as Inspect logs, one `.eval` file an entrant: `inspect view` opens them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trapline.arena.challenge import Challenge
from trapline.arena.errors import MissingError, UsageError
from trapline.arena.export.folder import claim
from trapline.arena.export.grading import dimension_scores, score_values, trap_states
from trapline.arena.record import DIMENSIONS, Bundle, Cell
from trapline.arena.report.slugs import assign

SCORER = "trapline"
BundleOf = Callable[[str], Bundle]


@dataclass(frozen=True)
class Run:
    """The cells of a run, with what they were asked and what they rest on."""

    name: str
    cells: Sequence[Cell]
    challenges: Mapping[str, Challenge]
    bundle_of: BundleOf


def write_eval_logs(run: Run, out: Path) -> list[Path]:
    """The samples of a log are an entrant's challenges, its epochs the attempts."""
    inspect = _inspect()
    if not run.cells:
        raise UsageError("the run holds no graded cell")
    claim(out, "eval")
    files = assign(cell.entrant for cell in run.cells)
    written = []
    cells = sorted(run.cells, key=lambda cell: cell.key)
    for entrant, group in groupby(cells, key=lambda cell: cell.entrant):
        path = out / f"{files[entrant]}.eval"
        inspect.log.write_eval_log(_log(inspect, run, list(group)), str(path), format="eval")
        written.append(path)
    return written


def _log(inspect: Any, run: Run, cells: list[Cell]) -> Any:
    log = inspect.log
    first = min(cell.started for cell in cells)
    last = max(_ended(cell) for cell in cells)
    names = list(dict.fromkeys(cell.challenge for cell in cells))
    measured = [cell for cell in cells if cell.score is not None]
    return log.EvalLog(
        status="success",
        eval=log.EvalSpec(
            eval_id=cells[0].bundle[:22] or "trapline",
            run_id=run.name,
            created=first.isoformat(),
            task="trapline",
            task_id=f"trapline-{run.name}",
            dataset=log.EvalDataset(name="trapline", samples=len(names), sample_ids=names),
            model=_model(cells[0]),
            config=log.EvalConfig(epochs=max(cell.attempt for cell in cells)),
            packages={"trapline": cells[0].versions.get("trapline", "")},
            metadata={"entrant": cells[0].entrant, "harness": cells[0].harness},
        ),
        results=log.EvalResults(
            total_samples=len(cells),
            completed_samples=len(measured),
            scores=_means(log, measured),
        ),
        stats=log.EvalStats(started_at=first.isoformat(), completed_at=last.isoformat()),
        samples=[_sample(inspect, run, cell) for cell in cells],
    )


def _model(cell: Cell) -> str:
    """Inspect names models provider/model; a field names entrants."""
    return cell.model or f"trapline/{cell.entrant}"


def _ended(cell: Cell) -> Any:
    return cell.started + timedelta(seconds=cell.seconds)


def _sample(inspect: Any, run: Run, cell: Cell) -> Any:
    log, model = inspect.log, _model(cell)
    known = run.challenges.get(cell.challenge)
    answer = _answer(run.bundle_of(cell.bundle)) if cell.bundle else ""
    prompt = known.prompt if known else cell.challenge
    output = inspect.model.ModelOutput.from_content(model, answer)
    unmeasured = cell.score is None
    return log.EvalSample(
        id=cell.challenge,
        epoch=cell.attempt,
        input=prompt,
        target="",
        messages=[inspect.model.ChatMessageUser(content=prompt), output.message],
        output=output,
        scores=None if unmeasured else {SCORER: _score(inspect, cell)},
        error=_error(log, cell) if unmeasured else None,
        metadata={"track": cell.track, "harness": cell.harness, "entrant": cell.entrant},
        started_at=cell.started.isoformat(),
        completed_at=_ended(cell).isoformat(),
        total_time=cell.seconds,
    )


def _score(inspect: Any, cell: Cell) -> Any:
    return inspect.scorer.Score(
        value=score_values(cell),
        explanation=f"{cell.letter}, {cell.state}: {cell.reason}",
        metadata={
            "state": cell.state,
            "letter": cell.letter,
            "isolation": cell.isolation,
            "traps": trap_states(cell),
            "dimensions": {name: one.reason for name, one in cell.dimensions.items()},
            "seed": cell.seed,
            "submission_digest": cell.submission_digest,
            "challenge_digest": cell.challenge_digest,
            "bundle": cell.bundle,
        },
    )


def _error(log: Any, cell: Cell) -> Any:
    """Nothing was measured: an error of the rig, as Inspect has it, and no zero."""
    return log.EvalError(message=f"{cell.state}: {cell.reason}", traceback="", traceback_ansi="")


def _answer(bundle: Bundle) -> str:
    return "\n".join(
        f"````python {name}\n{text}````\n" if text.endswith("\n") else f"````{name}\n{text}\n````\n"
        for name, text in bundle.files.items()
        if name != "prompt.md"
    )


def _means(log: Any, cells: list[Cell]) -> list[Any]:
    """The means that Inspect would have computed: of the grade and of each dimension."""
    columns = {"grade": [cell.score for cell in cells if cell.score is not None]}
    scores = [dimension_scores(cell) for cell in cells]
    for name in DIMENSIONS:
        columns[name] = [found[name] for found in scores if name in found]
    return [
        log.EvalScore(name=name, scorer=SCORER, reducer="mean", metrics=_metrics(log, values))
        for name, values in columns.items()
        if values
    ]


def _metrics(log: Any, values: list[float]) -> dict[str, Any]:
    found = {"mean": fmean(values)}
    if len(values) > 1:
        found["stderr"] = stdev(values) / len(values) ** 0.5
    return {name: log.EvalMetric(name=name, value=value) for name, value in found.items()}


def _inspect() -> Any:
    try:
        import inspect_ai
        import inspect_ai.log
        import inspect_ai.model
        import inspect_ai.scorer
    except ImportError:
        raise MissingError(
            "Inspect logs need the package inspect-ai; install it with: "
            "pip install 'trapline[inspect]'"
        ) from None
    return inspect_ai
