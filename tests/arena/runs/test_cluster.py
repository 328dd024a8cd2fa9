"""Cells on a Ray cluster: the same table as on one machine, whatever dies on the way."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path

import pytest

from trapline.arena.errors import MissingError
from trapline.arena.runs.cluster import Cluster
from trapline.arena.runs.store import Store

HERE = Path(__file__).parent
#: Bounds hangs only.
LONG = 900
#: What Ray gives up on a busy machine, or does to it when its memory is nearly full.
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_memory_monitor_refresh_ms": "0",
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Two challenges: one without measures, so that its scores are exact, one that takes times."""
    root = tmp_path_factory.mktemp("challenges")
    for name in ("plain", "timed"):
        shutil.copytree(
            HERE.parent / "sorting", root / name, ignore=shutil.ignore_patterns("__pycache__")
        )
        plan = root / name / "challenge.toml"
        text = plan.read_text().replace('id = "sorting"', f'id = "{name}"')
        # Nothing here hangs, and two nodes beside everything else keep a small machine busy.
        plan.write_text(text.replace("call_seconds = 4.0", "call_seconds = 60.0"))
        traps = root / name / "traps.py"
        traps.write_text(traps.read_text().replace("from sorting.", f"from {name}."))
    with (root / "plain" / "cases.py").open("a") as file:
        file.write("\n\ndel precision, memory, speed\n")
    return root


@pytest.fixture(scope="module")
def field(tmp_path_factory, sorting):
    """The gold solution and mutants of it."""
    root = tmp_path_factory.mktemp("field")
    gold = {"solution.py": sorting.solution_files()["solution.py"]}
    mutants = {trap.id: trap.plant(gold) for trap in sorting.traps[:3]}
    for name, files in {"gold": gold, **mutants}.items():
        for challenge in ("plain", "timed") if name == "gold" else ("plain",):
            folder = root / name / challenge
            folder.mkdir(parents=True)
            (folder / "solution.py").write_text(files["solution.py"])
    return root


@pytest.fixture(scope="module")
def environment(packages):
    """Ray's own folder, its own token, nothing of the machine's own clusters; short names only."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp" if Path("/tmp").is_dir() else None)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield kept | {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **PATIENT,
        "HOME": folder,
        "PYTHONPATH": str(packages),
    }
    shutil.rmtree(folder, ignore_errors=True)


class TwoNodes:
    """A cluster that ends when we do."""

    def __init__(self, environment):
        self.environment = environment
        self.log = Path(environment["RAY_TMPDIR"]) / "log"
        (Path(environment["RAY_TMPDIR"]) / "ray").mkdir()
        self.start()

    def start(self):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "two_nodes.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
            )

    @cached_property
    def address(self):
        """Known as soon as both nodes are up. Ray gives a node half a minute to start, whatever it
        is told, and a busy machine may need more: then once more."""
        for _ in range(3):
            for line in self.process.stdout:
                if line.startswith("address "):
                    return line.split()[1]
            self.end()
            self.start()
        pytest.fail(self.log.read_text())
        return None

    def end(self):
        self.process.stdin.close()
        self.process.wait(LONG)
        self.process.stdout.close()


@pytest.fixture
def two_nodes(environment):
    pytest.importorskip("ray")
    cluster = TwoNodes(environment)
    yield cluster
    cluster.end()


def start(packages, field, run, environment, *address):
    command = [sys.executable, HERE / "cluster_grader.py", packages, field, run, *address]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def until_both_nodes_are_at_work(grader):
    """The second cell goes where the first is not."""
    seen = []
    while sum(line.startswith("on ") for line in seen) < 2:
        seen.append(grader.stdout.readline())
        assert seen[-1], grader.stderr.read()
    return seen


def table(run):
    """Everything but what a clock says."""
    store = Store(run, create=False)
    cells = store.cells()
    assert sorted(cell.key for cell in store.history()) == [cell.key for cell in cells]
    assert all(store.has_bundle(cell.bundle) for cell in cells)
    assert store.waiting() == {}
    store.close()
    return [
        (cell.key, cell.state, cell.submission_digest, checks(cell), scores(cell)) for cell in cells
    ]


def checks(cell):
    return [(check.id, check.state, check.message) for check in (*cell.cases, *cell.traps)]


def scores(cell):
    known = {name: dimension.score for name, dimension in cell.dimensions.items()}
    if cell.challenge == "plain":
        return {**known, "all": cell.score}
    assert known.pop("speed") is not None
    assert known.pop("memory") is not None
    return known


def test_node_dies_and_the_table_is_that_of_one_machine(
    packages, field, environment, two_nodes, tmp_path
):
    # While the nodes start.
    alone = start(packages, field, tmp_path / "alone", environment)
    _, errors = alone.communicate(timeout=LONG)
    assert alone.returncode == 0, errors

    interrupted = start(packages, field, tmp_path / "run", environment, two_nodes.address)
    until_both_nodes_are_at_work(interrupted)
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=LONG)
    assert interrupted.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors

    grader = start(packages, field, tmp_path / "run", environment, two_nodes.address)
    until_both_nodes_are_at_work(grader)
    two_nodes.process.stdin.write("kill\n")
    two_nodes.process.stdin.flush()
    assert two_nodes.process.stdout.readline() == "killed\n"
    _, errors = grader.communicate(timeout=LONG)
    assert grader.returncode == 0, errors
    assert len(table(tmp_path / "run")) == 5
    assert table(tmp_path / "run") == table(tmp_path / "alone")


def test_unreachable_cluster_is_reported_at_once():
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(MissingError, match=f"^no Ray cluster answers at '{address}': "):
            Cluster(address)


def test_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingError, match=r"trapline\[ray\]"):
        Cluster("auto")
