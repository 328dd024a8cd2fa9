"""NeMo Gym and OpenEnv: the files that they expect, and servers that answer with our grade."""

import ast
import asyncio
import importlib.util
import json
import subprocess
import sys
import tomllib
from types import ModuleType, SimpleNamespace

import pytest
from pydantic import BaseModel

from trapline.arena.challenge import load, load_all
from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.export.environment import Graded
from trapline.arena.export.nemo_gym import write_nemo_gym
from trapline.arena.export.openenv import write_openenv
from trapline.arena.judge.contamination import hidden, leaks_in

CHALLENGE = "fused_softmax_topk"
GRADED = Graded(
    reward=0.5, state="fail", reason="wrong", findings=["merged-heaps"], seconds=1.0, waited=0.0,
    dimensions={"correctness": 0.25, "traps": 0.5, "speed": 0.0},
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    out = tmp_path_factory.mktemp("nemo")
    (folder,) = write_nemo_gym([load(CHALLENGE), load("kv_cache")], out)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    (folder,) = write_openenv([*load_all().values()], tmp_path_factory.mktemp("openenv"))
    return folder


def test_nemo_gym_folder_is_whole(server):
    assert server.parts[-2:] == ("resources_servers", "trapline")
    rows = [json.loads(line) for line in (server / "data/example.jsonl").read_text().splitlines()]
    assert [row["verifier_metadata"]["challenge"] for row in rows] == [CHALLENGE, "kv_cache"]
    for row in rows:
        expected = load(row["verifier_metadata"]["challenge"]).prompt
        assert row["responses_create_params"]["input"][-1]["content"] == expected
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((server / "configs/trapline.yaml").read_text())
    named = config["trapline"]["resources_servers"]["trapline"]
    assert (server / named["entrypoint"]).is_file()
    agent = config["trapline_simple_agent"]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"]["name"] in config
    assert (server.parents[1] / agent["datasets"][0]["jsonl_fpath"]).is_file()


@pytest.fixture
def app(server, monkeypatch):
    """The server's module on stand-ins for NeMo Gym's classes, which need a newer Python."""

    class VerifyRequest(BaseModel):
        responses_create_params: dict
        response: SimpleNamespace
        model_config = {"arbitrary_types_allowed": True}

    class VerifyResponse(VerifyRequest):
        reward: float
        reward_components: dict[str, float]
        mask_sample: bool = False
        failure_reason: str | None = None

    base = ModuleType("nemo_gym.base_resources_server")
    base.BaseResourcesServerConfig = base.SimpleResourcesServer = BaseModel
    base.BaseVerifyRequest, base.BaseMultiRewardVerifyResponse = VerifyRequest, VerifyResponse
    monkeypatch.setitem(sys.modules, "nemo_gym", ModuleType("nemo_gym"))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    spec = importlib.util.spec_from_file_location("trapline_app", server / "app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verify(app, monkeypatch, grade):
    monkeypatch.setattr(app, "grade_answer", grade)
    body = app.TraplineVerifyRequest(
        responses_create_params={},
        response=SimpleNamespace(output_text="```python solution.py\nx = 1\n```"),
        verifier_metadata={"challenge": CHALLENGE},
    )
    served = app.TraplineResourcesServer(config=app.TraplineConfig())
    return asyncio.run(served.verify(body))


def test_nemo_gym_server_answers_with_the_grade(app, monkeypatch):
    async def grade(challenge, files, kind):
        assert (challenge, files, kind) == (CHALLENGE, {"solution.py": "x = 1\n"}, "quick")
        return GRADED

    found = verify(app, monkeypatch, grade)
    assert (found.reward, found.mask_sample, found.findings) == (0.5, False, ["merged-heaps"])
    assert found.reward_components == {"correctness": 0.25, "traps": 0.5, "robustness": 0.0}


def test_nemo_gym_server_masks_what_could_not_be_measured(app, monkeypatch):
    async def grade(*_):
        raise ArenaError("not measured: no sandbox")

    found = verify(app, monkeypatch, grade)
    assert (found.mask_sample, found.failure_reason) == (True, "not measured: no sandbox")


@pytest.mark.full
def test_nemo_gym_serves_the_exported_server(server):
    """NeMo Gym's own classes, over HTTP: gold gets 1, a reply without files 0."""
    pytest.importorskip("nemo_gym")
    program = (
        "import json\n"
        "from unittest.mock import MagicMock\n"
        "from fastapi.testclient import TestClient\n"
        "from nemo_gym.server_utils import ServerClient\n"
        "from app import TraplineConfig, TraplineResourcesServer\n"
        "from trapline.arena.challenge import load\n"
        "row = json.loads(open('data/example.jsonl').readline())\n"
        "config = TraplineConfig(host='127.0.0.1', port=1, entrypoint='app.py', name='trapline')\n"
        "served = TraplineResourcesServer(config=config, server_client=MagicMock(ServerClient))\n"
        "client = TestClient(served.setup_webserver())\n"
        "def verify(text):\n"
        "    content = [{'type': 'output_text', 'text': text, 'annotations': []}]\n"
        "    message = {'id': 'm', 'type': 'message', 'role': 'assistant',\n"
        "               'status': 'completed', 'content': content}\n"
        "    response = {'id': 'r', 'created_at': 0, 'model': 'm', 'object': 'response',\n"
        "                'output': [message], 'parallel_tool_calls': False,\n"
        "                'tool_choice': 'auto', 'tools': []}\n"
        "    answer = client.post('/verify', json={**row, 'response': response})\n"
        "    assert answer.status_code == 200, answer.text\n"
        "    return answer.json()\n"
        f"files = load({CHALLENGE!r}).solution_files()\n"
        "gold = verify(''.join(f'````python {n}\\n{t}````\\n' for n, t in files.items()))\n"
        "assert (gold['reward'], gold['mask_sample']) == (1.0, False), gold\n"
        "assert gold['reward_components']['correctness'] == 1.0\n"
        "assert verify('no')['reward'] == 0.0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=server, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_openenv_folder_is_whole(environment):
    project = tomllib.loads((environment / "pyproject.toml").read_text())["project"]
    assert {one.split(">")[0] for one in project["dependencies"]} == {"openenv", "trapline"}
    for path in environment.rglob("*.py"):
        ast.parse(path.read_text())
    rows = json.loads((environment / "tasks.json").read_text())
    assert [row["challenge"] for row in rows] == [*load_all()]
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((environment / "openenv.yaml").read_text())
    module, _, name = manifest["app"].partition(":")
    app = (environment / f"{module.replace('.', '/')}.py").read_text()
    assert f"{name} = create_app(" in app
    assert manifest["validation"]["reward"]["range"] == [0.0, 1.0]
    assert "bubblewrap" in (environment / "server/Dockerfile").read_text()


def test_exports_hold_nothing_of_the_judge(server, environment):
    for folder in (server, environment):
        # What a test imported has left compiled modules there.
        files = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc")
        text = "\n".join(path.read_text() for path in files)
        assert leaks_in(text, hidden(load(CHALLENGE))) == []


def test_existing_exports_are_left_alone(server, environment):
    with pytest.raises(UsageError, match="left alone"):
        write_nemo_gym([load(CHALLENGE)], server.parents[1])
    with pytest.raises(UsageError, match="left alone"):
        write_openenv([load(CHALLENGE)], environment.parent)


@pytest.mark.full
def test_openenv_episode_ends_with_the_reward(environment):
    pytest.importorskip("openenv")
    program = (
        "from server.trapline_environment import TraplineEnvironment\n"
        "from models import TraplineAction\n"
        "from server.app import app\n"
        "from trapline.arena.challenge import load\n"
        "env = TraplineEnvironment()\n"
        f"assert env.reset(challenge={CHALLENGE!r}).prompt == load({CHALLENGE!r}).prompt\n"
        f"gold = env.step(TraplineAction(files=load({CHALLENGE!r}).solution_files()))\n"
        "assert (gold.reward, gold.done, gold.state) == (1.0, True, 'pass'), gold\n"
        "env.reset(seed=1)\n"
        "assert env.step(TraplineAction(reply='no')).reward == 0.0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
