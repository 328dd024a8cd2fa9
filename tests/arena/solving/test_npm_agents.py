"""The agents that npm offers are installed, and each flag of a template is looked up in its help.

Heavy (hundreds of megabytes) and dependent on a registry, so part of `make test-full` only.
"""

import os
import re
import shutil
import subprocess

import pytest

from trapline.arena.solving import agents

INSTALL_SECONDS = 900
HELP_SECONDS = 120


def newest(package):
    return f"{package}@latest"


def install(package, prefix):
    """True when npm could install it; some platforms' parts are published later than the rest."""
    prefix.mkdir()
    command = ["npm", "install", "--prefix", str(prefix), "--no-audit", "--no-fund", package]
    done = subprocess.run(
        command, cwd=prefix, capture_output=True, text=True, timeout=INSTALL_SECONDS
    )
    return done.returncode == 0, done.stderr


@pytest.fixture
def programs(tmp_path, request):
    """The folder with an agent's program: the newest version, else the one that was tested."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    agent = agents.find(request.param)
    for number, package in enumerate((newest(agent.package), f"{agent.package}@{agent.tested}")):
        worked, trouble = install(package, tmp_path / f"try-{number}")
        if worked:
            return tmp_path / f"try-{number}" / "node_modules" / ".bin"
    pytest.skip(f"npm could not install {agent.package}: {trouble.strip()[-300:]}")
    return None


@pytest.mark.full
@pytest.mark.parametrize("programs", list(agents.table()), indirect=True)
def test_every_flag_of_a_template_is_in_that_versions_help(programs, tmp_path, request):
    name = request.node.callspec.params["programs"]
    agent = agents.find(name)
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": path, "CI": "1", "NO_COLOR": "1"}

    def run(command):
        done = subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HELP_SECONDS,
        )
        return done.stdout + done.stderr

    version = re.search(r"\d+\.\d+\.\d+", run(agent.version))
    assert version, f"{name} names no version"
    print(f"{name} {version[0]}, tested before: {agent.tested}")
    shown = "\n".join(run(command) for command in agent.help)
    known = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown))
    assert set(agent.flags) <= known
    used = {part for part in agent.command if part.startswith("--") and part != "--"}
    assert used == set(agent.flags), "every flag that is used is looked up"
