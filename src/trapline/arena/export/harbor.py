"""Challenges as Harbor task folders whose verifier is our grader.

The verifier runs in a container of its own (`tests/Dockerfile`), so neither traps nor the gold
answer are ever in the agent's. The format is that of Harbor 0.25, schema 1.4.
"""

import json
import platform
import re
import shutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import trapline
from trapline.arena.challenge import Challenge
from trapline.arena.errors import UsageError
from trapline.arena.export.own_package import core_requirements, metadata_text, own_version
from trapline.arena.judge.contamination import canary
from trapline.arena.solving.deploy import copy_workspace

WORKSPACE = "/app"
AGENT_SECONDS, VERIFIER_SECONDS = 3600, 1800
_TOOLS = ("numpy", "pytest")

_TASK = """\
# {canary}
schema_version = "1.4"
artifacts = [{{ source = "{workspace}", exclude = [".git", ".venv", "__pycache__"] }}]

[task]
name = "trapline/{id}"
version = {version}
description = {summary}
keywords = ["trapline", "llm-systems", {difficulty}]

[metadata]
title = {title}
difficulty = {difficulty}
category = "llm-systems"
challenge_digest = "{digest}"

[agent]
timeout_sec = {agent_seconds}

[verifier]
timeout_sec = {verifier_seconds}
environment_mode = "separate"

[environment]
workdir = "{workspace}"
cpus = 2
memory_mb = {memory_mb}
docker_image = "{agent_image}"

[verifier.environment]
docker_image = "{verifier_image}"
workdir = "/tests"
cpus = 2
memory_mb = {memory_mb}
"""
#: Where images are without --images: on this machine only, never pulled from a public registry.
LOCAL_IMAGES = "localhost"
_BUILD_SCRIPT = """\
#!/usr/bin/env bash
# Builds the images that the tasks of this folder name, and pushes those of a registry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
build() {
  docker build --tag "$1" "$2"
  case "$1" in
    localhost/*) ;;
    *) docker push "$1" ;;
  esac
}
for task in */task.toml; do
  mapfile -t images < <(sed -n 's/^docker_image = "\\(.*\\)"$/\\1/p' "$task")
  build "${images[0]}" "$(dirname "$task")/environment"
  build "${images[1]}" "$(dirname "$task")/tests"
done
"""
_IMAGE_PREFIX = re.compile(r"[a-z0-9][a-z0-9.:/_-]*[a-z0-9]")
_AGENT_IMAGE = """\
FROM python:{python}-slim
RUN pip install --no-cache-dir {tools}
COPY workspace/ {workspace}/
WORKDIR {workspace}
"""
_VERIFIER_IMAGE = """\
FROM python:{python}-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap \\
    && rm -rf /var/lib/apt/lists/*
COPY requirements.txt /tests/requirements.txt
RUN pip install --no-cache-dir -r /tests/requirements.txt
COPY . /tests
"""
_TEST_SCRIPT = """\
#!/usr/bin/env bash
# {canary}
# Grades what the agent left and writes reward.json; writes none when the machine cannot judge.
set -euo pipefail
tests="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
export PYTHONPATH="$tests/package" PYTHONDONTWRITEBYTECODE=1
# Nothing is imported from the agent's folder.
cd "$tests"
exec python3 -P -m trapline.arena.export.verifier {id} \\
  "${{TRAPLINE_WORKSPACE:-{workspace}}}" "${{TRAPLINE_VERIFIER_LOGS:-/logs/verifier}}"
"""
_SOLVE_SCRIPT = """\
#!/usr/bin/env bash
# {canary}
set -euo pipefail
solution="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
cp -r "$solution/answer/." "${{TRAPLINE_WORKSPACE:-{workspace}}}/"
"""


def check_images(images: str) -> None:
    """Refuse what cannot begin the name of an image."""
    if not _IMAGE_PREFIX.fullmatch(images):
        raise UsageError(
            f"{images!r} is not the start of an image name: give registry and owner in lower case, "
            "such as ghcr.io/me"
        )


def write_tasks(
    challenges: Iterable[Challenge], out: Path, images: str = LOCAL_IMAGES
) -> list[Path]:
    """One task folder a challenge; none is written where one exists already.

    Tasks name prebuilt images, which begin with `images` (registry and owner); `build-images.sh`
    makes them from the Dockerfiles.
    """
    check_images(images)
    folders = {out / challenge.id: challenge for challenge in challenges}
    for folder in folders:
        if folder.exists():
            raise UsageError(f"{folder} exists already and is left alone")
    written = [_write_task(challenge, folder, images) for folder, challenge in folders.items()]
    _write_script(out / "build-images.sh", _BUILD_SCRIPT)
    return written


def _write_task(challenge: Challenge, folder: Path, images: str) -> Path:
    facts = _facts(challenge, images)
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(_TASK.format(**facts), encoding="utf-8")
    (folder / "instruction.md").write_text(challenge.prompt, encoding="utf-8")
    copy_workspace(challenge, folder / "environment" / "workspace")
    (folder / "environment" / "Dockerfile").write_text(
        _AGENT_IMAGE.format(**facts), encoding="utf-8"
    )
    _write_tests(challenge, folder / "tests", facts)
    shutil.copytree(challenge.solution, folder / "solution" / "answer", ignore=_no_leftovers)
    _write_script(folder / "solution" / "solve.sh", _SOLVE_SCRIPT.format(**facts))
    return folder


def _facts(challenge: Challenge, images: str) -> dict[str, object]:
    plan = challenge.plan
    image = f"{images}/trapline-{challenge.id}"
    return {
        "agent_image": f"{image}-agent:{own_version()}",
        "verifier_image": f"{image}-verifier:{own_version()}",
        "id": challenge.id,
        "canary": canary(challenge.id),
        "title": json.dumps(plan.title),
        "summary": json.dumps(plan.summary),
        "difficulty": json.dumps(plan.difficulty),
        "digest": challenge.digest,
        "version": json.dumps(own_version()),
        "agent_seconds": AGENT_SECONDS,
        "verifier_seconds": VERIFIER_SECONDS,
        "memory_mb": 2 * plan.limits.memory_mb + 2048,
        "workspace": WORKSPACE,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "tools": " ".join(_pinned((*_TOOLS, *plan.packages))),
    }


def _write_tests(challenge: Challenge, folder: Path, facts: dict[str, object]) -> None:
    folder.mkdir()
    _copy_package(folder / "package")
    needed = _pinned((*core_requirements(), *challenge.plan.packages))
    (folder / "requirements.txt").write_text(
        "".join(f"{line}\n" for line in needed), encoding="utf-8"
    )
    (folder / "Dockerfile").write_text(_VERIFIER_IMAGE.format(**facts), encoding="utf-8")
    _write_script(folder / "test.sh", _TEST_SCRIPT.format(**facts))


def _write_script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _copy_package(folder: Path) -> None:
    """This very package with its metadata, as a folder for PYTHONPATH: no download when judging."""
    source = Path(trapline.__file__).parent
    shutil.copytree(source, folder / source.name, ignore=_no_leftovers)
    metadata = folder / f"trapline-{own_version()}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(metadata_text(), encoding="utf-8")


_no_leftovers = shutil.ignore_patterns("__pycache__", ".*", "*.pyc")


def _pinned(names: Iterable[str]) -> list[str]:
    """Each package with the version that is installed here; what is not comes in its newest."""
    return [_pin(name) for name in dict.fromkeys(names)]


def _pin(name: str) -> str:
    try:
        # A local build's suffix (+cpu) names no release.
        return f"{name}=={version(name).split('+')[0]}"
    except PackageNotFoundError:
        return name
