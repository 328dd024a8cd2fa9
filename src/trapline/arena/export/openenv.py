"""An OpenEnv environment: a folder with models, client and server."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from trapline.arena.challenge import Challenge
from trapline.arena.errors import UsageError
from trapline.arena.export.environment import task_row
from trapline.arena.export.noise import noise_list
from trapline.arena.export.own_package import own_version

_TEMPLATES = Path(__file__).with_name("templates")
ENVIRONMENT = "trapline_env"
_FILES = {
    "models.py": "openenv_models.py",
    "client.py": "openenv_client.py",
    "server/app.py": "openenv_app.py",
    "server/trapline_environment.py": "openenv_environment.py",
}

_MANIFEST = """\
spec_version: 1
name: trapline_env
version: {version}
type: space
runtime: fastapi
app: server.app:app
port: 8000
validation:
  reward:
    range: [0.0, 1.0]
    oracle_tolerance: 0.0
    floor_margin: 0.1
  resources:
    cpu: 2.0
    memory_mb: 6144
    disk_mb: 2048
    episode_timeout_s: 600.0
  capabilities:
    verifier:
      kind: reward_channel
  types:
    tags: [coding]
"""
_PROJECT = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "openenv-trapline-env"
version = "{version}"
description = "Trapline's challenges as an OpenEnv environment"
requires-python = ">=3.11"
dependencies = ["openenv>=0.4.1", "trapline>={version}"]

[project.scripts]
server = "trapline_env.server.app:main"

[tool.setuptools]
packages = ["trapline_env", "trapline_env.server"]
package-dir = {{ "trapline_env" = ".", "trapline_env.server" = "server" }}
package-data = {{ "trapline_env" = ["tasks.json", "openenv.yaml"] }}
"""
_DOCKERFILE = """\
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap \\
    && rm -rf /var/lib/apt/lists/*
COPY . /app/env
RUN pip install --no-cache-dir /app/env
WORKDIR /app/env
CMD ["uvicorn", "server.app:app", "--host", "0.0.0.0", "--port", "8000"]
"""
_INIT = '''\
"""Trapline's challenges as an OpenEnv environment."""

from trapline_env.client import TraplineEnv
from trapline_env.models import TraplineAction, TraplineObservation

__all__ = ["TraplineAction", "TraplineEnv", "TraplineObservation"]
'''
_README = """\
# trapline_env

One challenge an episode: `reset(challenge="kv_cache")` gives the prompt and the starter, `step`
with a reply (whole files in fenced blocks) or with files grades them and ends the episode. The
reward is 0 to 1; where the server's machine cannot judge, `step` raises.

Noise, the share of known bugs that would get full reward:

{noise}
"""


def write_openenv(challenges: Sequence[Challenge], out: Path) -> list[Path]:
    folder = out / ENVIRONMENT
    if folder.exists():
        raise UsageError(f"{folder} exists already and is left alone")
    (folder / "server").mkdir(parents=True)
    for name, template in _FILES.items():
        shutil.copy(_TEMPLATES / template, folder / name)
    facts = {"version": own_version()}
    rows = [task_row(one.id).model_dump(mode="json") for one in challenges]
    texts = {
        "__init__.py": _INIT,
        "server/__init__.py": "",
        "tasks.json": json.dumps(rows, indent=1) + "\n",
        "openenv.yaml": _MANIFEST.format(**facts),
        "pyproject.toml": _PROJECT.format(**facts),
        "server/Dockerfile": _DOCKERFILE,
        "README.md": _README.format(noise=noise_list(challenges)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder]
