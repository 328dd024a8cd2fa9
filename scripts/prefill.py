"""Fills an environment with what the project needs by uv, in a small part of the time of pip.

    python scripts/prefill.py PYTHON EXTRA...

uv reads neither pip's configuration nor its variables, so it is told what they say. Where they say
something that this does not know, or anything fails, nothing is lost: pip is run afterwards in any
case, and installs what is not there or not as it would choose.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What uv calls an option of pip, and what separates several values of it.
KNOWN = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
#: Options that change neither where packages come from nor which are chosen.
HARMLESS = {
    "break-system-packages", "cache-dir", "default-timeout", "disable-pip-version-check",
    "no-color", "no-input", "no-python-version-warning", "progress-bar", "require-virtualenv",
    "retries", "root-user-action", "timeout",
}  # fmt: skip
#: pip's order: what an environment variable says counts more than a file.
SECTIONS = ("global", "install", ":env:")


def told(configuration: str) -> dict[str, str] | None:
    """The variables for uv that say what `pip config list` printed; None if something is new."""
    sections: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in configuration.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in sections:
            sections[section][option] = ast.literal_eval(value)
    options = sections["global"] | sections["install"] | sections[":env:"]
    if options.keys() - KNOWN.keys() - HARMLESS:
        return None
    variables = {}
    for option, (variable, separator) in KNOWN.items():
        if option in options:
            variables[variable] = separator.join(options[option].split())
    return variables


def prefill(python: str, extras: list[str]) -> None:
    pip = [python, "-m", "pip"]
    listed = [*pip, "config", "list"]
    configuration = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    variables = told(configuration)
    if variables is None:
        return
    quietly = ["--quiet", "--no-compile", "-c", "constraints.txt"]
    subprocess.run([*pip, "install", *quietly, "uv"], cwd=ROOT, capture_output=True, check=True)
    # As pip: of all indexes the newest release, and no file of uv's own says another.
    command = [str(Path(python).parent / "uv"), "pip", "install", "--quiet", "--no-config"]
    command += ["--index-strategy", "unsafe-best-match", "--python", python]
    command += ["-c", "constraints.txt", "-r", "pyproject.toml"]
    command += [part for extra in extras for part in ("--extra", extra)]
    environment = os.environ | variables
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)


if __name__ == "__main__":
    try:
        prefill(sys.argv[1], sys.argv[2:])
    except (OSError, ValueError, subprocess.CalledProcessError):
        print("uv could not be used: pip alone installs everything")
