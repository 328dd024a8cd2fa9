"""Traps that the GPU challenges share: state between calls, changed inputs, streams, dtypes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trapline.arena.gpu import mutants
from trapline.arena.gpu.checks import Rng, leaves_inputs_alone, with_late_inputs
from trapline.arena.judge.traps import Check, Mutant, Trap, trap
from trapline.arena.process.proxy import Submission

SEEN_AS = "on the CPU track, as "


@dataclass(frozen=True)
class EntryTraps:
    """Traps of one entry point: `make` draws a small problem, `ask` checks the answer to it."""

    entry: str
    #: Where the entry point ends in the gold solution.
    last: str
    outputs: int
    make: Callable[[Rng], Any]
    ask: Callable[[Submission, Any], None]
    control: Check

    def stale_answer(self, what: str = "batch") -> Trap:
        def stale_answer(submission: Submission, rng: Rng) -> None:
            for _ in range(3):
                self.ask(submission, self.make(rng))

        return trap(
            catches="an answer remembered for this shape or this address",
            severity="major",
            story=f"The next {what} lies in the same memory and has other values.",
            mutant=mutants.stale_answer(self.last, self.entry, self.outputs),
            control=self.control,
        )(stale_answer)

    def remembered_by_fingerprint(
        self,
        changed: Callable[[Any, Rng], Any],
        story: str = "A fingerprint of some elements does not see a change in another.",
    ) -> Trap:
        """`changed` gets the problem that was asked, and gives another one like it."""

        def remembered_by_fingerprint(submission: Submission, rng: Rng) -> None:
            problem = self.make(rng)
            self.ask(submission, problem)
            self.ask(submission, changed(problem, rng))

        return trap(
            catches="an answer remembered by a few of the values",
            severity="major",
            story=story,
            mutant=mutants.fingerprint(self.last, self.entry, self.outputs),
            control=self.control,
        )(remembered_by_fingerprint)

    def inputs_modified(
        self,
        catches: str,
        place: int,
        story: str = "Inputs belong to the caller.",
        arguments: Callable[[Any], tuple[Any, ...]] = tuple,
    ) -> Trap:
        """The mutant writes to the argument at `place`."""

        def inputs_modified(submission: Submission, rng: Rng) -> None:
            leaves_inputs_alone(submission, self.entry, *arguments(self.make(rng)))

        return trap(
            catches=catches,
            severity="major",
            story=story,
            mutant=mutants.modified_input(self.last, self.entry, place),
            control=self.control,
        )(inputs_modified)

    def wrong_stream(self) -> Trap:
        def wrong_stream(submission: Submission, rng: Rng) -> None:
            problem = self.make(rng)
            self.ask(submission, problem)
            self.ask(with_late_inputs(submission), problem)

        return trap(
            catches="work is launched on a stream of its own, which does not wait for the caller's",
            severity="major",
            story="The inputs are still being written on the caller's stream.",
            mutant=mutants.wrong_stream(self.last, self.entry),
            control=self.control,
        )(wrong_stream)


def seen_on_cpu(trap_id: str) -> str:
    """Where the bug was seen: as this trap of the same challenge on the CPU track."""
    return f"{SEEN_AS}{trap_id}"


def read_as_float16(ask: Check, mutant: Mutant, control: Check) -> Trap:
    """`ask` makes a call in bfloat16."""

    def bfloat16_read_as_float16(submission: Submission, rng: Rng) -> None:
        ask(submission, rng)

    return trap(
        catches="bfloat16 is read as float16",
        severity="major",
        story="Both have two bytes; a launcher that looks at the size alone takes one for the "
        "other.",
        mutant=mutant,
        control=control,
    )(bfloat16_read_as_float16)
