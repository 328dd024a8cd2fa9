"""`trapline serve` as a process, and what it refuses."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from trapline.cli.main import build, guarded

DEMO = Path(__file__).parents[2] / "src" / "trapline" / "gold" / "ternary" / "demo_model"


@pytest.fixture(scope="module")
def checkpoint(saved_decoder):
    folder, _ = saved_decoder(vocab_size=8192, num_hidden_layers=1)
    shutil.copy(DEMO / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return folder


@pytest.fixture
def run(capsys, monkeypatch):
    def run(*args, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = None
        try:
            guarded(lambda: build("serve")(["serve", *map(str, args)], prog_name="trapline"))
        except SystemExit as ended:
            code = ended.code or 0
        return code, " ".join(capsys.readouterr().err.split())

    return run


def post(url, path, body, key):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=60) as found:
        return json.load(found)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal(checkpoint, stop):
    command = [sys.executable, "-m", "trapline", "serve", "--model", str(checkpoint)]
    with subprocess.Popen(
        [*command, "--port", "0", "--name", "small", "--rows", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRAPLINE_API_KEY": "key"},
    ) as running:
        name, url = running.stdout.readline().strip().split(" at ")
        assert name == "small"
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        found = post(url, "/chat/completions", body, "key")
        assert found["usage"]["completion_tokens"] == 3
        running.send_signal(stop)
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (0, "")


def test_a_used_port_is_refused(checkpoint, run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run("--model", checkpoint, "--port", port)
    assert code == 2
    assert f"127.0.0.1:{port} cannot be used: Address already in use" in said


BAD = [
    (("--model", "nowhere"), {}, 2, "nowhere"),
    (("--port", "70000"), {}, 2, "less than or equal to 65535"),
    (("--rows", "0"), {}, 2, "rows"),
    (("--chat-template", "nowhere.jinja"), {}, 2, "nowhere.jinja"),
    (("--host", "no.such.host.invalid", "--port", "0"), {}, 2, "no.such.host.invalid:0 cannot be"),
    ((), {"TRAPLINE_API_KEY": " "}, 2, "TRAPLINE_API_KEY is empty: unset it, or give a key"),
]


@pytest.mark.parametrize(("arguments", "variables", "status", "sentence"), BAD)
def test_bad_input_is_refused_with_a_sentence(
    checkpoint, run, arguments, variables, status, sentence
):
    given = arguments if "--model" in arguments else (*arguments, "--model", checkpoint)
    code, said = run(*given, **variables)
    assert code == status
    assert sentence in said


def test_a_broken_template_and_a_missing_tokenizer_are_refused(checkpoint, run, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% if %}")
    code, said = run("--model", checkpoint, "--chat-template", tmp_path / "broken.jinja")
    assert (code, "not valid jinja (line 1)" in said) == (2, True)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint / file, tmp_path)
    code, said = run("--model", tmp_path)
    assert (code, "needs a checkpoint with a tokenizer.json" in said) == (2, True)


def test_a_missing_package_is_named_with_its_extra(checkpoint, run, monkeypatch):
    for name in [one for one in sys.modules if one.startswith("trapline.gold.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, said = run("--model", checkpoint)
    assert code == 3
    assert "serving needs uvicorn: trapline[torch,serve]" in said


def test_an_open_address_without_a_key_is_warned_about(checkpoint, run, monkeypatch):
    from trapline.gold.serve.server import Server

    monkeypatch.setattr(Server, "run", lambda self, sockets: None)
    monkeypatch.delenv("TRAPLINE_API_KEY", raising=False)
    code, said = run("--model", checkpoint, "--host", "0.0.0.0", "--port", "0")
    assert (code, "everyone who reaches 0.0.0.0 may ask" in said) == (0, True)
