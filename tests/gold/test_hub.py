"""Hub ids: what is downloaded, from where, and what is said when that fails."""

import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from trapline.gold import hub
from trapline.gold.errors import RangeError

GONE = SimpleNamespace(headers={}, request=SimpleNamespace(url="", method="GET"), status_code=404)


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A hub that holds one repository; records what is asked of it."""
    asked = []

    def snapshot(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    def one_file(name, file):
        asked.append((name, file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one_file)
    return asked


def test_paths_stay_as_they_are(served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for given in ("org/name", tmp_path, "./org/other", "/org/name", "name", "a/b/c", "~/x"):
        assert str(hub.local_model(given)) == str(given).removeprefix("./")
    assert served == []


def test_an_id_downloads_data_only(served, tmp_path):
    assert hub.local_model("org/name-1.5B") == tmp_path
    ((name, options),) = served
    assert name == "org/name-1.5B"
    assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.jinja"]
    assert "consolidated*" in options["ignore_patterns"]
    assert hub.local_model("org/name/sub/m-Q8_0.gguf") == tmp_path / "sub/m-Q8_0.gguf"
    assert hub.local_config("org/name") == tmp_path
    assert served[1:] == [("org/name", "sub/m-Q8_0.gguf"), ("org/name", "config.json")]


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (errors.GatedRepoError("x", response=GONE), RangeError, "org/name is gated: accept"),
        (errors.RepositoryNotFoundError("x", response=GONE), RangeError, "nor a public model"),
        (
            errors.LocalEntryNotFoundError("x"),
            FileNotFoundError,
            "cannot be reached; give a folder",
        ),
        (errors.OfflineModeIsEnabled("x"), FileNotFoundError, "cannot be reached; give a folder"),
        (ConnectionError("x"), FileNotFoundError, "cannot be reached; give a folder"),
        (errors.RemoteEntryNotFoundError("x", response=GONE), RangeError, "has no such file"),
        (
            errors.HfHubHTTPError("500 oops\nmore", response=GONE),
            RangeError,
            "refused org/name: 500",
        ),
    ],
)
def test_failures_are_one_sentence(monkeypatch, error, kind, sentence):
    def fail(*given, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind, match=sentence) as caught:
        hub.local_model("org/name")
    assert "\n" not in str(caught.value)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"install huggingface_hub \(trapline\[hub\]\)"):
        hub.local_model("org/name")
