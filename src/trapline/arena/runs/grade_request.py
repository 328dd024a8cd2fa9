"""One cell on its way to where it is graded: everything that the place must be told, and nothing
that it could not be told over a wire."""

import importlib
from dataclasses import dataclass
from pathlib import Path

from trapline.arena.challenge import Challenge
from trapline.arena.errors import ArenaError
from trapline.arena.judge.grade import Job
from trapline.arena.judge.intake import Intake
from trapline.arena.record import Level
from trapline.arena.runs.field import Entry


@dataclass(frozen=True)
class Shipment:
    """The submission travels as bytes, the challenge as the name of the package that holds it."""

    entry: Entry
    package: str
    challenge_digest: str
    level: Level
    seed: int
    full: bool
    intake: Intake

    def job(self, challenge: Challenge) -> Job:
        return Job(self.entry, challenge, self.level, self.seed, self.full)


def find_challenge(package: str, digest: str) -> Challenge:
    """The challenge as this machine has it, refused when that is not the one meant."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise ArenaError(f"the challenge {package} cannot be imported: {error}") from None
    challenge = Challenge(Path(str(module.__file__)).parent, package)
    if challenge.digest != digest:
        raise ArenaError(f"another version of the challenge {challenge.id} is installed")
    return challenge


def measures_time(challenge: Challenge) -> bool:
    """Whether grading it takes times, which nothing else on the machine may disturb."""
    return hasattr(challenge.module("cases"), "speed")
