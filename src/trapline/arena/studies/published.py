"""Reads the figures. What they mean, and whether they agree, is worked out in this package."""

import tomllib
from importlib import resources
from typing import Any

FILES = ("field", "grades", "scores", "matchups", "facts", "claims", "readings")


def load() -> dict[str, dict[str, Any]]:
    """Every file by its name, exactly as written."""
    folder = resources.files(__package__) / "data"
    return {name: tomllib.loads((folder / f"{name}.toml").read_text("utf-8")) for name in FILES}
