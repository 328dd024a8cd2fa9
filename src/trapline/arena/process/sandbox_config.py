"""From a challenge's limits to the rig its submissions run in."""

from collections.abc import Iterable

from trapline.arena.challenge import Challenge
from trapline.arena.process.isolation.packages import is_installed
from trapline.arena.process.sandbox import Limits
from trapline.arena.process.session import Rig
from trapline.arena.record import Level


def rig_for(challenge: Challenge, level: Level, call_seconds: float | None = None) -> Rig:
    """The same rig for every submission of a challenge; only the patience may differ."""
    limits = challenge.plan.limits
    return Rig(
        level=level,
        limits=Limits(memory_mb=limits.memory_mb, processes=limits.processes),
        call_seconds=call_seconds or limits.call_seconds,
        packages=tuple(name for name in challenge.plan.packages if is_installed(name)),
    )


def missing_packages(challenge: Challenge, imports: Iterable[str]) -> list[str]:
    """What a submission may import, does import, and does not find on this machine."""
    used = {name.split(".")[0] for name in imports}
    return [name for name in challenge.plan.packages if name in used and not is_installed(name)]
