"""Version and requirements of this package: as installed, or of the source tree it runs in."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import trapline
from trapline.arena.errors import MissingError

#: Of a source tree: two folders above the package.
PROJECT = Path(trapline.__file__).parents[2] / "pyproject.toml"


def own_version() -> str:
    try:
        return distribution("trapline").version
    except PackageNotFoundError:
        return str(_project()["version"])


def core_requirements() -> list[str]:
    """The packages that grading needs, without those of any extra."""
    try:
        lines = distribution("trapline").requires or []
    except PackageNotFoundError:
        lines = _project()["dependencies"]
    plain = [line for line in lines if "extra ==" not in line]
    return [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in plain]


def metadata_text() -> str:
    """The METADATA file of an installation."""
    try:
        return distribution("trapline").read_text("METADATA") or ""
    except PackageNotFoundError:
        project = _project()
        needs = "".join(f"Requires-Dist: {line}\n" for line in project["dependencies"])
        return f"Metadata-Version: 2.1\nName: trapline\nVersion: {project['version']}\n{needs}"


def _project() -> dict[str, Any]:
    if not PROJECT.is_file():
        raise MissingError(
            "trapline is not installed, and its folder is not part of a source tree; "
            "install it with: pip install trapline"
        )
    project: dict[str, Any] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    return project
