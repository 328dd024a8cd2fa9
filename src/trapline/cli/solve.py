"""`trapline solve`: let a model or an agent fill workspaces."""

from pathlib import Path
from typing import Annotated

import typer

from trapline.arena.challenge import load, load_all
from trapline.arena.deploy import check_entrant
from trapline.arena.errors import UsageError
from trapline.arena.run import choose_level
from trapline.arena.solving import agents
from trapline.arena.solving.endpoint import Endpoint, RateLimit
from trapline.arena.solving.solve import Assignment, Solver, solve_all
from trapline.arena.solving.solvers import AgentSolver, EndpointSolver, Price
from trapline.cli.main import INCOMPLETE


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    example = "trapline solve field --endpoint http://localhost:8000/v1 --model my-model"
    app.command(epilog=f"Example: {example}")(solve)


def solve(
    field: Annotated[Path, typer.Argument(help="Where the field lies or will lie.")],
    model: Annotated[str, typer.Option(help="The model's name at its provider.")],
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible URL; the key is OPENAI_API_KEY.")
    ] = None,
    agent: Annotated[str | None, typer.Option(help="claude, codex, opencode or pi.")] = None,
    agent_cmd: Annotated[
        str | None, typer.Option(help="Any other command, with {prompt} and {model}.")
    ] = None,
    entrant: Annotated[str | None, typer.Option(help="The model's name if not given.")] = None,
    challenge: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    attempts: Annotated[int, typer.Option(min=1, help="Attempts a cell.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often an endpoint may see its own tests fail.")
    ] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time.")] = 4,
    per_minute: Annotated[float | None, typer.Option(min=0.01, help="Request limit.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of an agent or request.")
    ] = 3600,
    input_usd: Annotated[float | None, typer.Option(help="Price of a million tokens in.")] = None,
    output_usd: Annotated[float | None, typer.Option(help="Price of a million tokens out.")] = None,
    budget_usd: Annotated[float | None, typer.Option(help="Stop when this is spent.")] = None,
) -> None:
    """Fill workspaces of a field; the same command goes on where it stopped.

    A cell whose provider was dead is no answer: it is tried again next time and never graded.
    """
    solver: Solver
    if [endpoint, agent, agent_cmd].count(None) != 2:
        raise UsageError("name one of --endpoint, --agent and --agent-cmd")
    if endpoint is not None:
        remote = Endpoint(endpoint, model, timeout=seconds, rate=RateLimit(per_minute))
        solver = EndpointSolver(remote, choose_level(), rounds, Price(input_usd, output_usd))
    else:
        described = agents.find(agent) if agent else agents.from_template(agent_cmd or "")
        solver = AgentSolver(agent or "agent-cmd", model, described, seconds)
    name = check_entrant(entrant or model.replace("/", "-").replace(":", "-"))
    chosen = [load(one) for one in challenge or load_all()]
    numbers = range(1, attempts + 1)
    assignments = [Assignment(name, one, number, field) for one in chosen for number in numbers]
    unsolved = 0
    for assignment, record in solve_all(assignments, solver, jobs, budget_usd):
        cost = f", {record.cost_usd:.4f} USD" if record.cost_usd is not None else ""
        tokens = f"{record.input_tokens} + {record.output_tokens} tokens{cost}"
        where = f"{name}/{assignment.challenge.id} #{assignment.attempt}"
        print(f"{where}: {record.status} {record.reason} ({tokens}, {record.seconds:g} s)")
        unsolved += record.status == "infra_error"
    if unsolved:
        print(f"{unsolved} cells got no answer from the provider; the same command tries again")
        raise typer.Exit(INCOMPLETE)
