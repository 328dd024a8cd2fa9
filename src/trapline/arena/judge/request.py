"""One answer to grade: whose it is, where it lies, and how to grade it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trapline.arena.judge.intake import Intake, take_in
from trapline.arena.profile import ADAPTER, CUDA_ADAPTER, FLAWED, GOLDEN
from trapline.arena.record import CellKey, Level, Origin, Track

#: What stands before and after the cause of a missing answer, in the reason of its cell.
NO_ANSWER = "the model gave no answer (", ")"
#: Before what kept an answer from being graded, likewise.
TROUBLE = "there is no answer to grade: "


@dataclass(frozen=True)
class GradeRequest:
    """Everything that grading needs beside the challenge itself; can be sent to another machine."""

    entrant: str
    #: The challenge's id.
    challenge: str
    attempt: int
    folder: Path
    #: How the answer was produced, and by which model; empty where unknown.
    harness: str = ""
    model: str = ""
    origin: Origin | None = None
    #: Why there is no answer (for example, the provider failed); such a cell is `infra_error`.
    trouble: str = ""
    #: Why the model gave no answer, by its record; counts while the starter is unchanged.
    unanswered: str = ""
    #: The conversation that led to the answer, redacted; kept as evidence.
    transcript: Sequence[Mapping[str, str]] = ()
    #: The prompt that it answers, as a profile of the challenge; empty for the challenge's own.
    profile: str = ""
    level: Level = "process"
    seed: int = 0
    full: bool = False
    #: Other answers are graded with this seed.
    shares_seed: bool = False
    #: Runs cases and traps only, without the slow ones: no measurement, no own tests. For training,
    #: where a reward must come in seconds; such a cell does not belong in a run.
    checks_only: bool = False
    track: Track = "cpu"
    #: The folder of a private trap set.
    trap_set: Path | None = None
    #: The submission's bytes; read from `folder` when None.
    intake: Intake | None = None

    @property
    def key(self) -> CellKey:
        """Identifies the cell in a run."""
        return CellKey(self.entrant, self.challenge, self.track, self.attempt)

    def read(self) -> Intake:
        if self.intake is not None:
            return self.intake
        taken = take_in(self.folder, entry_files(self.profile, self.track))
        if self.profile != FLAWED:
            return taken
        # The prompt hands out this file: neither its code nor its bugs are the entrant's.
        own = {name: text for name, text in taken.files.items() if name != f"{GOLDEN}.py"}
        return Intake(own, taken.refused)


def entry_files(profile: str, track: Track) -> tuple[str, ...]:
    """The files one of which an answer must have."""
    if track == "gpu":
        own = "solution.py", "solution.cu"
        return (CUDA_ADAPTER, *own) if profile else own
    return (ADAPTER, "solution.py") if profile not in ("", FLAWED) else ("solution.py",)
