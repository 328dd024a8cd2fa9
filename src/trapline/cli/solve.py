"""`trapline solve`: let a model or an agent fill workspaces."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.errors import UsageError
from trapline.arena.record import Track
from trapline.arena.runs.run import choose_level
from trapline.arena.solving import agents
from trapline.arena.solving.deploy import check_entrant, claim_field
from trapline.arena.solving.endpoint import Endpoint, RateLimit
from trapline.arena.solving.predicted import assign_predictions, entrant_of
from trapline.arena.solving.solve import Assignment, Solver, solve_all
from trapline.arena.solving.solvers import AgentSolver, EndpointSolver, Price
from trapline.cli.deploy import Variant, asked_challenges
from trapline.cli.exit_codes import INCOMPLETE
from trapline.cli.isolation import Isolation

EXAMPLE = "trapline solve field --endpoint http://localhost:8000/v1 --model my-model"


def solve(
    field: Annotated[Path, typer.Argument(help="The field's folder; made if needed.")],
    model: Annotated[str | None, typer.Option(help="The model's name at its provider.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible URL; the key is OPENAI_API_KEY.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="claude, codex, opencode or pi.")] = None,
    agent_cmd: Annotated[
        str | None, typer.Option(help="Any other command, with {prompt} and {model}.")
    ] = None,
    from_predictions: Annotated[
        Path | None, typer.Option(help="SWE-bench-style JSON lines: patches against the starters.")
    ] = None,
    entrant: Annotated[
        str | None, typer.Option(help="Entrant's name; default: the model's.")
    ] = None,
    challenge: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    attempts: Annotated[int, typer.Option(min=1, help="Attempts per cell.")] = 1,
    variant: Variant = None,
    track: Annotated[Track, typer.Option(help="gpu: prompts for CUDA and Triton.")] = "cpu",
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Rounds in which an endpoint sees the results of its tests; on the GPU track, "
            "whether its answer compiles.",
        ),
    ] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time.")] = 4,
    per_minute: Annotated[float | None, typer.Option(min=0.01, help="Requests per minute.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of an agent or request.")
    ] = 3600,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature of an endpoint.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Nucleus sampling of an endpoint.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a reply of an endpoint.")
    ] = None,
    effort: Annotated[
        str | None, typer.Option(help="Reasoning effort of an endpoint, for example high.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of an endpoint; attempt n gets seed + n - 1.")
    ] = None,
    input_usd: Annotated[
        float | None, typer.Option(min=0, help="Price of a million input tokens.")
    ] = None,
    output_usd: Annotated[
        float | None, typer.Option(min=0, help="Price of a million output tokens.")
    ] = None,
    budget_usd: Annotated[
        float | None, typer.Option(min=0, help="Stop when this amount is spent.")
    ] = None,
    isolation: Isolation = None,
) -> None:
    """Fill workspaces of a field; the same command resumes where it stopped.

    A cell whose provider fails is not graded; the next run tries it again.
    """
    _refuse_several(endpoint, agent, agent_cmd, from_predictions)
    if from_predictions is not None:
        _refuse_beside_predictions(model, entrant, track)
    price = Price(input_usd, output_usd)
    if endpoint is None and (rounds > 1 or per_minute or isolation or price != Price()):
        raise UsageError("--rounds, --per-minute, --isolation and prices need --endpoint")
    sampling = _sampling(
        endpoint,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        effort=effort,
        seed=seed,
    )
    chosen = asked_challenges(challenge or [], variant, track)
    claim_field(field, variant or "", track)
    if from_predictions is not None:
        wanted = [one.id for one in chosen] if challenge else []
        work = assign_predictions(from_predictions, field, wanted)
    else:
        if model is None:
            raise UsageError("--model is missing: give the model's name")
        solver: Solver
        if endpoint is not None:
            rate = RateLimit(per_minute)
            remote = Endpoint(endpoint, model, timeout=seconds, rate=rate, sampling=sampling)
            solver = EndpointSolver(remote, choose_level(None, isolation), rounds, price)
        else:
            solver = _agent(agent, agent_cmd, model, seconds)
        name = check_entrant(entrant) if entrant else entrant_of(model)
        places = product(chosen, range(1, attempts + 1))
        work = [(solver, [Assignment(name, one, number, field) for one, number in places])]
    unsolved = sum(_solve(solver, assigned, jobs, budget_usd) for solver, assigned in work)
    if unsolved:
        print(f"{unsolved} cells got no answer from the provider; the same command tries again")
        raise typer.Exit(INCOMPLETE)


def _refuse_several(*ways: str | Path | None) -> None:
    if ways.count(None) != len(ways) - 1:
        raise UsageError(
            "give exactly one of --endpoint, --agent, --agent-cmd and --from-predictions"
        )


def _refuse_beside_predictions(model: str | None, entrant: str | None, track: Track) -> None:
    if model or entrant:
        raise UsageError("--from-predictions names its models itself: remove --model and --entrant")
    if track == "gpu":
        raise UsageError(
            "--from-predictions patches the starters of the CPU track: remove --track gpu"
        )


def _sampling(
    endpoint: str | None, **asked: float | int | str | None
) -> dict[str, float | int | str]:
    """What was asked for; an agent takes none of it."""
    sampling = {name: value for name, value in asked.items() if value is not None}
    if endpoint is None and sampling:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sampling)
        raise UsageError(f"only --endpoint takes {options}: an agent chooses its sampling itself")
    return sampling


def _agent(agent: str | None, command: str | None, model: str, seconds: float) -> AgentSolver:
    described = agents.find(agent) if agent else agents.from_template(command or "")
    return AgentSolver(agent or "agent-cmd", model, described, seconds)


def _solve(solver: Solver, assigned: list[Assignment], jobs: int, budget_usd: float | None) -> int:
    """How many cells the provider left without an answer."""
    unsolved = 0
    for assignment, record in solve_all(assigned, solver, jobs, budget_usd):
        cost = f", {record.cost_usd:.4f} USD" if record.cost_usd is not None else ""
        tokens = f"{record.input_tokens} + {record.output_tokens} tokens{cost}"
        where = f"{assignment.entrant}/{assignment.challenge.id} #{assignment.attempt}"
        print(f"{where}: {record.status} {record.reason} ({tokens}, {record.seconds:g} s)")
        unsolved += record.status == "infra_error"
    return unsolved
