"""Opens submissions of either track: a worker for NumPy answers, a rig for GPU answers."""

import contextlib
import os
from collections.abc import Collection
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trapline.arena.challenge import Challenge
from trapline.arena.gpu.contract import entries
from trapline.arena.gpu.memory import device_here, why_no_gpu
from trapline.arena.gpu.nvml import driver_version
from trapline.arena.gpu.rig import GpuSubmission, Rig
from trapline.arena.gpu.runner import find_nvcc
from trapline.arena.process.proxy import Submission
from trapline.arena.process.session import SandboxConfig
from trapline.arena.record import GPU_FACTS, Level

#: With this variable, host memory and Triton's interpreter stand in for a GPU. For tests.
STAND_IN = "TRAPLINE_GPU_STAND_IN"


@cache
def shared_rig(device: str) -> Rig:
    """One judge for all answers that this process grades."""
    return Rig(device)


def why_not_gradable(files: Collection[str] = ()) -> str:
    """Why GPU answers, or the one with these files, cannot be graded here; empty where they can."""
    reason = why_no_gpu()
    if reason and not os.environ.get(STAND_IN):
        return f"there is no GPU here: {reason}"
    if "solution.cu" in files and "solution.py" not in files and find_nvcc() is None:
        return "solution.cu needs nvcc, which is not installed on this machine"
    return ""


def machine_facts() -> dict[str, str]:
    """What a GPU's times depend on; cells of different facts are never ranked together."""
    facts = shared_rig(device_here()).judge.facts if not why_not_gradable() else {}
    known = {name: str(facts[name]) for name in GPU_FACTS if name in facts}
    if driver := driver_version():
        known["driver"] = driver
    for package in ("torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def open_submission(
    challenge: Challenge,
    folder: Path,
    level: Level,
    call_seconds: float | None = None,
    *,
    full: bool = False,
) -> Submission:
    return open_with(challenge, folder, challenge.sandbox_config(level, call_seconds), full=full)


def open_with(
    challenge: Challenge, folder: Path, config: SandboxConfig, *, full: bool = False
) -> Submission:
    """The submission in this folder, in a sandbox of this kind."""
    if challenge.track == "cpu":
        return Submission(folder, config, full=full)
    contract = entries(challenge.module("cases"))
    return GpuSubmission(folder, config, contract, shared_rig(config.device), full=full)
