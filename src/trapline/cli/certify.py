"""`trapline certify`: checks that the traps themselves work."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from trapline.arena import output_paths
from trapline.arena.certify.certify import Certificate, Certifier, Outcome, kill_rate
from trapline.arena.certify.diagnosis import (
    SEEDS,
    DiagnosisCertificate,
    DiagnosisCertifier,
    write_dictionary,
)
from trapline.arena.certify.diagnosis_matrix import diagnosis_matrix, found_in_words
from trapline.arena.certify.kill_matrix import kill_matrix
from trapline.arena.certify.red_team import find_corpus, markdown, read_corpus, run_red_team
from trapline.arena.challenge import Challenge, load, load_all, refuse_unknown_profile
from trapline.arena.errors import InterruptedRunError, MissingError, UsageError
from trapline.arena.gpu.opening import why_not_gradable
from trapline.arena.judge.draws import public_seed
from trapline.arena.process.sandbox import probe
from trapline.arena.profile import profile_names
from trapline.arena.record import Level, Track
from trapline.arena.runs.run import choose_level
from trapline.cli.exit_codes import NOT_HELD
from trapline.cli.isolation import Isolation, Required
from trapline.cli.trap_sets import read_trap_set

EXAMPLE = "trapline certify --challenge layer_norm_backward"
#: At least this share of the mechanical mutants that are not equivalent must be killed.
MECHANICAL_GOAL = 0.9
#: So many of them a challenge go through the diagnosis.
MECHANICAL_SAMPLE = 40


def certify(
    challenge: Annotated[list[str] | None, typer.Option(help="Only this one; repeatable.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Certify this profile of the challenges.", show_default=False),
    ] = None,
    red_team: Annotated[
        bool, typer.Option(help="Run the hostile submissions instead of the traps.")
    ] = False,
    mechanical: Annotated[
        bool, typer.Option(help="Also test mechanical mutants of the gold solutions.")
    ] = False,
    diagnosis: Annotated[
        bool,
        typer.Option(help="Check instead that each bug, alone and in pairs, is found by name."),
    ] = False,
    dictionary: Annotated[
        bool,
        typer.Option(help="Record anew which checks each mutant fails; the diagnosis reads it."),
    ] = False,
    pairs: Annotated[
        int, typer.Option(min=0, help="With --diagnosis: pairs of bugs per challenge.")
    ] = 25,
    track: Annotated[
        Track, typer.Option(help="gpu: the challenges, or the red team, of the GPU track.")
    ] = "cpu",
    traps: Annotated[
        Path | None,
        typer.Option(help="Certify the challenges of this private trap set, its traps included."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the results to this Markdown file.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the inputs; random by default.")
    ] = None,
    isolation: Isolation = None,
    required: Required = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run right answers, mutants and controls through every case and trap.

    Exit code 0: right answers pass, every trap kills its mutant, controls fail.
    Exit code 4: one of these does not hold; the output names it.
    """
    if red_team and (challenge or mechanical or traps):
        raise UsageError(
            "--red-team runs the whole red team: remove --challenge, --mechanical and --traps"
        )
    if write is not None:
        output_paths.file(write, "the matrix")
    level = choose_level(required, isolation)
    with _interruptible(written=dictionary or bool(diagnosis and write)):
        if red_team:
            _certify_by_attack(level, track, write, seed, as_json)
            return
        chosen = _chosen(challenge or [], profile, track, traps)
        if dictionary:
            _write_dictionaries(chosen, seed or 0)
            return
        if diagnosis:
            sample = MECHANICAL_SAMPLE if mechanical else 0
            _certify_diagnosis(chosen, seed, pairs, sample, write, as_json)
            return
        levels = probe() if isolation is None else (level,)
        certificates = [_certify(one, level, levels, seed, mechanical) for one in chosen]
        if write is not None:
            write.write_text(kill_matrix(certificates), encoding="utf-8")
        if as_json:
            print(json.dumps({"certificates": [c.model_dump(mode="json") for c in certificates]}))
        else:
            for certificate in certificates:
                _print(certificate)
        if not all(map(_holds, certificates)):
            raise typer.Exit(NOT_HELD)


@contextmanager
def _interruptible(*, written: bool) -> Iterator[None]:
    """Says what Ctrl-C leaves; `written`: challenge by challenge."""
    try:
        yield
    except (KeyboardInterrupt, InterruptedRunError):
        kept = "challenges that were finished are written" if written else "nothing is kept"
        raise InterruptedRunError(f"{kept}, the same command begins anew") from None


def _chosen(
    names: list[str], profile: str | None, track: Track, traps: Path | None
) -> list[Challenge]:
    """The named challenges or all of them, under their own contract or a profile's."""
    if traps is not None:
        private = read_trap_set(traps, names, profile, track)
        return [load(name, trap_set=private.folder) for name in names or private.challenges]
    if track == "gpu" and (reason := why_not_gradable()):
        raise MissingError(reason)
    if profile is None:
        return [load(name, track) for name in names] or list(load_all(track).values())
    refuse_unknown_profile(profile)
    shipped = load_all(track).values()
    having = names or [one.id for one in shipped if profile in profile_names(one.folder)]
    return [judge for name in having if not (judge := load(name, track, profile)).not_run]


def _certify_by_attack(
    level: Level, track: Track, write: Path | None, seed: int | None, as_json: bool
) -> None:
    """Runs the attacks; a success rate above zero does not hold."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("red team", total=len(read_corpus(find_corpus(track))))
        team = run_red_team(level, track, seed=seed, on_attempt=lambda _: progress.advance(task))
    if write is not None:
        write.write_text(markdown(team), encoding="utf-8")
    if as_json:
        print(team.model_dump_json())
    else:
        count = len(team.attempts)
        print(f"attack success {len(team.succeeded)} of {count} at level {team.level}")
        for attempt in team.attempts:
            if attempt.surprising:
                print(f"  {attempt.name}: {attempt.state}, {attempt.gained or attempt.reason}")
        for name, state in team.honest.items():
            print(f"  honest {name}: {state}")
    if not team.holds():
        raise typer.Exit(NOT_HELD)


def _write_dictionaries(chosen: list[Challenge], seed: int) -> None:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for challenge in chosen:
            task = progress.add_task(challenge.id, total=len(SEEDS) * len(challenge.traps))
            with DiagnosisCertifier(challenge, seed) as certifier:
                fails = certifier.dictionary(lambda task=task: progress.advance(task))  # type: ignore[misc]
            print(f"wrote {write_dictionary(challenge, fails)}")


def _certify_diagnosis(
    chosen: list[Challenge],
    seed: int | None,
    pairs: int,
    mechanical: int,
    write: Path | None,
    as_json: bool,
) -> None:
    """Every named bug must lead with its own finding, and right answers have none."""
    certificates = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for challenge in chosen:
            drawn = public_seed(seed)
            with DiagnosisCertifier(challenge, drawn) as certifier:
                subjects = list(certifier.subjects(pairs, mechanical))
                task = progress.add_task(challenge.id, total=len(subjects))
                certificates.append(
                    certifier.certify(subjects, lambda _, task=task: progress.advance(task))  # type: ignore[misc]
                )
            if write is not None:  # after each one: a challenge takes minutes
                write.write_text(diagnosis_matrix(certificates), encoding="utf-8")
            if not as_json:
                _print_diagnosis(certificates[-1])
    if as_json:
        print(json.dumps({"certificates": [c.model_dump(mode="json") for c in certificates]}))
    if not all(certificate.holds() for certificate in certificates):
        raise typer.Exit(NOT_HELD)


def _print_diagnosis(certificate: DiagnosisCertificate) -> None:
    summary = certificate.summary()
    print(f"{certificate.challenge} (seed {certificate.seed})")
    for name, value in summary.items():
        print(f"  {name.replace('_', ' ')}: {value:g}")
    for diagnosed in [*certificate.mutants, *certificate.pairs, *certificate.right]:
        if not diagnosed.is_exact:
            print(f"  {diagnosed.subject}: {found_in_words(diagnosed)}")


def _certify(
    challenge: Challenge,
    level: Level,
    levels: Sequence[Level],
    seed: int | None,
    mechanical: bool,
) -> Certificate:
    certifier = Certifier(challenge, level, seed, levels if challenge.track == "cpu" else ())
    with Progress(console=Console(stderr=True), transient=True) as progress:
        total = len(certifier.subjects(mechanical))
        task = progress.add_task(challenge.id, total=total)

        def advance(_: Outcome) -> None:
            progress.advance(task)

        return certifier.certify(mechanical=mechanical, on_finding=advance)


def _holds(certificate: Certificate) -> bool:
    if certificate.of("mechanical") and kill_rate(certificate) < MECHANICAL_GOAL:
        return False
    return not certificate.problems()


def _print(certificate: Certificate) -> None:
    console = Console()
    parts = [f"{len(certificate.of('right'))} right answers"]
    for kind, noun in (
        ("named", "named mutants"),
        ("control", "controls"),
        ("mechanical", "mechanical mutants"),
    ):
        subjects = certificate.of(kind)
        if subjects:
            killed = sum(1 for subject in subjects if subject.fell_to)
            parts.append(f"{killed}/{len(subjects)} {noun} killed")
    parts += [f"{one.subject}: {one.message}" for one in certificate.of("flaw")]
    problems = certificate.problems()
    parts.append(f"{len(problems)} problems")
    console.print(
        f"[bold]{certificate.challenge}[/bold]: {', '.join(parts)} (seed {certificate.seed})"
    )
    survivors = [f for f in certificate.of("mechanical") if not f.fell_to]
    for finding in [*problems, *survivors]:
        text = f"  {finding.kind} {finding.subject}: {finding.problem or finding.message}"
        detail = (
            f" — {finding.fell_to} {finding.message}" if finding.problem and finding.fell_to else ""
        )
        console.print((text + detail)[:600], markup=False, highlight=False)
