"""A resources server for NeMo Gym (0.5 to 0.7), to be copied into its checkout."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from trapline.arena.challenge import Challenge
from trapline.arena.errors import UsageError
from trapline.arena.export.environment import task_row
from trapline.arena.export.noise import noise_list
from trapline.arena.export.own_package import own_version

_APP = Path(__file__).with_name("templates") / "nemo_gym_app.py"
SERVER = "trapline"

_CONFIG = """\
trapline:
  resources_servers:
    trapline:
      entrypoint: app.py
      domain: coding
      verified: false
      description: LLM-systems challenges with hidden traps, graded by Trapline
      value: Train code for kernels, caches and decoding with a reward of known noise
      trapline_reward: quick
trapline_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server:
        type: resources_servers
        name: trapline
      model_server:
        type: responses_api_models
        name: policy_model
      datasets:
      - name: example
        type: example
        jsonl_fpath: resources_servers/trapline/data/example.jsonl
"""
_README = """\
# trapline

Copy `resources_servers/trapline` into a checkout of NeMo Gym. `verify` grades the files of a reply
in a sandbox on the server's machine. The reward is 0 to 1; `reward_components` are its dimensions.
Where the machine cannot judge, the sample is masked.

Noise, the share of known bugs that would get full reward with `trapline_reward: quick`:

{noise}
"""


def write_nemo_gym(challenges: Sequence[Challenge], out: Path) -> list[Path]:
    """`resources_servers/trapline` with these challenges as its example data."""
    folder = out / "resources_servers" / SERVER
    if folder.exists():
        raise UsageError(f"{folder} exists already and is left alone")
    for inner in ("configs", "data"):
        (folder / inner).mkdir(parents=True)
    shutil.copy(_APP, folder / "app.py")
    (folder / "configs" / "trapline.yaml").write_text(_CONFIG, encoding="utf-8")
    rows = "".join(json.dumps(_row(one)) + "\n" for one in challenges)
    (folder / "data" / "example.jsonl").write_text(rows, encoding="utf-8")
    requirements = f"-e nemo-gym[dev] @ ../../\ntrapline>={own_version()}\n"
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    (folder / "README.md").write_text(
        _README.format(noise=noise_list(challenges)), encoding="utf-8"
    )
    return [folder]


def _row(challenge: Challenge) -> dict[str, object]:
    task = task_row(challenge.id)
    return {
        "responses_create_params": {
            "input": [
                {"role": "system", "content": task.system_prompt},
                {"role": "user", "content": task.prompt},
            ]
        },
        "verifier_metadata": {"challenge": task.challenge, "reward_noise": task.noise["quick"]},
        "agent_ref": {"type": "responses_api_agents", "name": "trapline_simple_agent"},
    }
