"""How fast an attack of the GPU track seems: its time beside the gold solution's.

The race goes through the ring, the clock and the new inputs of a grade, and needs neither the speed
of light nor baselines, so that dozens of attacks can be raced.
"""

from pathlib import Path

import numpy as np

from trapline.arena.challenge import Challenge
from trapline.arena.errors import Violation
from trapline.arena.gpu import turns
from trapline.arena.gpu.contract import entries
from trapline.arena.gpu.fresh_inputs import refuse_remembered
from trapline.arena.gpu.opening import shared_rig
from trapline.arena.gpu.rig import GpuSubmission
from trapline.arena.gpu.timing import Clock, learn, make_ring
from trapline.arena.record import Dimension, Level

ROUNDS = 3


def race(challenge: Challenge, folder: Path, level: Level) -> Dimension:
    """100 points at the gold solution's time, half of them at twice that time."""
    config, contract = challenge.sandbox_config(level), entries(challenge.module("cases"))
    rig = shared_rig(config.device)
    ring = make_ring(rig, contract, challenge.module("cases").raced(), np.random.default_rng())
    try:
        with (
            turns.alone(rig.gpu),
            GpuSubmission(challenge.solution, config, contract, rig) as gold,
            GpuSubmission(folder, config, contract, rig) as answer,
        ):
            learn(ring, gold)
            honest = Clock(ring, gold).times(ROUNDS).best
            clock = Clock(ring, answer)
            times = clock.times(ROUNDS)
            refuse_remembered(clock, gold, times)
    except Violation as violation:
        return Dimension(score=0.0, reason=f"could not be measured: {violation}")
    finally:
        ring.release()
    share = min(1.0, honest / max(times.best, 1e-9))
    reason = f"{times.best * 1e6:.1f} µs a call, the gold solution takes {honest * 1e6:.1f} µs"
    return Dimension(score=round(100 * share, 1), reason=reason)
