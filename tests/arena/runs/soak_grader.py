"""As `grader.py`, with a clock that is SOAK_CLOCK seconds off."""

import datetime
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import grader

from trapline.arena.judge import grade
from trapline.cli.main import guarded

OFF = datetime.timedelta(seconds=float(os.environ.get("SOAK_CLOCK", "0")))


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + OFF


if __name__ == "__main__":
    grade.datetime = Clock
    guarded(lambda: grader.main(*sys.argv[1:]))
