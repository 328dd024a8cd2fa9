"""The wheel and the sdist: complete, and usable where there is no checkout."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHALLENGE = "dflash"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The sdist of the checkout, and the wheel that is built from the sdist alone."""
    for tool in ("build", "hatchling"):
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {*archive.namelist()}


def tracked():
    """The files of the package that git knows or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/trapline"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("this source tree is not a git checkout")
    return {name.removeprefix("src/") for name in done.stdout.split("\n") if name}


def test_wheel_holds_every_file_of_the_package(names):
    wanted = {name for name in tracked() if (ROOT / "src" / name).is_file()}
    field = ROOT / "examples" / "field"
    shipped = [path.relative_to(field) for path in field.rglob("*") if path.is_file()]
    wanted |= {f"trapline/example_field/{path}" for path in shipped}
    assert wanted - names == set()
    assert {name for name in names if ".dist-info/" not in name} - wanted == set()
    for name in ("py.typed", "example_field/field.toml", "arena/certify/data/certificates.json"):
        assert f"trapline/{name}" in names


def test_metadata_is_complete(wheel, names):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name,) = (one for one in names if one.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_string(archive.read(name).decode())
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {*metadata.get_all("Provides-Extra")} == {*project["optional-dependencies"]}
    for field in ("Summary", "Author", "Keywords", "Requires-Python", "License-File"):
        assert metadata[field]
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert "[vllm.general_plugins]\ntrapline = trapline.gold.vllm:register" in entry_points


def test_readme_describes_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| `([a-z-]+)` \| \S.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {*extras["optional-dependencies"]} <= {*rows}


def test_sdist_has_the_field_once_and_no_tests(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"} <= inside
    assert {name.split("/")[0] for name in inside} & {"tests", "docs"} == set()
    fields = [name for name in inside if name.endswith("field/field.toml")]
    assert fields == ["examples/field/field.toml"]


def test_demo_of_the_installed_wheel_runs_without_the_checkout(wheel, tmp_path):
    """In an environment of its own that sees the packages of this one, but not its Trapline."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python, program = (environment / "bin" / name for name in ("python", "trapline"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # Appends the packages of this environment, without reading its .pth files (editable installs).
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command):
        return subprocess.run(
            [*map(str, command)], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, text=True,
            capture_output=True, timeout=300,
        )  # fmt: skip

    where = run(python, "-c", "import trapline; print(trapline.__file__)").stdout
    assert where.startswith(str(environment))
    done = run(program, "demo", "--challenge", CHALLENGE)
    assert done.returncode == 0, done.stdout + done.stderr
    for entrant in ("gold", "textbook", "hasty", "broken", "confident"):
        assert entrant in done.stdout
    page = tmp_path / "runs" / "demo" / "report" / "index.html"
    assert "textbook" in page.read_text()
    shutil.rmtree(tmp_path / "runs")
