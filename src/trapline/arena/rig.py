"""From a challenge's limits to the rig its submissions run in."""

from trapline.arena.challenge import Challenge
from trapline.arena.record import Level
from trapline.arena.sandbox import Limits
from trapline.arena.session import Rig


def rig_for(challenge: Challenge, level: Level, call_seconds: float | None = None) -> Rig:
    """The same rig for every submission of a challenge; only the patience may differ."""
    limits = challenge.plan.limits
    return Rig(
        level=level,
        limits=Limits(memory_mb=limits.memory_mb, processes=limits.processes),
        call_seconds=call_seconds or limits.call_seconds,
        packages=tuple(challenge.plan.packages),
    )
