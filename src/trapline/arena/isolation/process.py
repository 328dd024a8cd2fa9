"""Level `process`: a child with rlimits and a clean environment; it can read what we can."""

import json
import os
import sys

from trapline.arena.isolation.limits import environment, rlimits
from trapline.arena.isolation.spec import Launch
from trapline.arena.isolation.stage import Stage

#: The interpreter itself, not a virtual environment's link to it: no site-packages come along.
PYTHON = os.path.realpath(sys.executable)
#: Isolated, no site (so no .pth file and no sitecustomize), nothing written beside sources.
FLAGS = ("-I", "-S", "-B")


def command(launch: Launch, stage: Stage) -> tuple[list[str], dict[str, str]]:
    """What to execute, and its whole environment."""
    plan = {
        "program": str(stage.program),
        "site": str(stage.site(launch.packages)),
        "rlimits": {} if "rlimits" in launch.without else rlimits(launch.limits),
        "supervise": True,
    }
    channel = str(launch.channel.fileno())
    inside = [PYTHON, *FLAGS, str(stage.inside), json.dumps(plan), channel, str(stage.submission)]
    return inside, environment(str(stage.scratch))
