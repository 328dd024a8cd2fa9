"""What uv is told of pip's configuration, before it fills the environment of the tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prefill():
    place = ROOT / "scripts" / "prefill.py"
    spec = importlib.util.spec_from_file_location("prefill", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_indexes_of_pip_are_told(prefill):
    configuration = """:env:.find-links='/wheels /more'
:env:.timeout='180'
global.cert='/certificates.pem'
global.extra-index-url='file:///one\\nfile:///two'
global.find-links='/replaced'
install.index-url='https://mirror.example/simple'
freeze.timeout='10'
"""
    assert prefill.told(configuration) == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/certificates.pem",
    }


def test_without_a_configuration_nothing_is_told(prefill):
    assert prefill.told("") == {}


@pytest.mark.parametrize("option", ["no-index", "pre", "client-cert", "only-binary"])
def test_uv_is_not_used_where_pip_is_told_more(prefill, option):
    assert prefill.told(f"global.{option}='1'\n") is None


def test_a_failure_leaves_everything_to_pip(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "prefill.py"), str(tmp_path / "python")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip alone" in done.stdout
