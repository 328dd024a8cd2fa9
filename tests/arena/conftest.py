"""The arena's tests use a challenge of their own, small enough to grade in a second."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "certify"), str(HERE / "diagnosis"), str(HERE / "gpu")]
# What the machine's environment says of its own databases is not meant for tests.
for name in [name for name in os.environ if name.startswith("PG")]:
    del os.environ[name]
# Submissions, not tests: they are graded, never collected.
collect_ignore = ["cheats", "gpu_cheats"]
collect_ignore_glob = ["*/solution/*", "*/alternates/*", "*/starter/*"]


@pytest.fixture(scope="session")
def sorting():
    """The sorting challenge."""
    from trapline.arena.challenge import Challenge

    return Challenge(HERE / "sorting", "sorting")


@pytest.fixture(scope="session")
def level():
    """The strongest isolation this machine has."""
    from trapline.arena.runs.run import choose_level

    return choose_level()


@pytest.fixture
def known_sorting(sorting, monkeypatch):
    """The sorting challenge as one of those that ship."""
    from trapline.arena import challenge

    monkeypatch.setattr(challenge, "load_all", lambda *_: {"sorting": sorting})
    return sorting


@pytest.fixture
def no_measures(monkeypatch):
    """Grades without precision, memory and speed, for tests that look at none of them."""
    from trapline.arena.judge import grade

    monkeypatch.setattr(grade, "_measures", lambda challenge: [])


@pytest.fixture
def gold_source(sorting):
    """The text of the gold solution."""
    return (sorting.solution / "solution.py").read_text()


@pytest.fixture
def submission_folder(tmp_path):
    """Makes a submission's folder out of a text."""

    def make(source: str, **others: str) -> Path:
        folder = tmp_path / f"submission{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "solution.py").write_text(textwrap.dedent(source))
        for name, text in others.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        return folder

    return make


class PostgresServer:
    """A PostgreSQL server of our own, reached through a socket in its folder."""

    PASSWORD = "pass/word@with:signs%and#more"

    def __init__(self, programs: Path, folder: Path, user: str | None) -> None:
        self.programs, self.folder, self.user = programs, folder, user
        self.data, self.log = folder / "data", folder / "log"
        self.environment = os.environ | {"LC_ALL": "C", "TZ": "UTC"}
        secret = folder / "secret"
        secret.write_text(self.PASSWORD)
        if user is not None:
            shutil.chown(folder, user)
            shutil.chown(secret, user)
        command = [programs / "initdb", "-D", self.data, "-U", "team", "-A", "scram-sha-256"]
        command += [f"--pwfile={secret}", "--no-sync", "--encoding=UTF8", "--locale=C"]
        made = subprocess.run(command, capture_output=True, text=True, timeout=300, **self._as())
        assert made.returncode == 0, made.stdout + made.stderr
        self.process = None

    def _as(self):
        user = {} if self.user is None else {"user": self.user, "group": self._group()}
        extra = {} if self.user is None else {"extra_groups": []}
        return {"cwd": self.folder, "env": self.environment, **user, **extra}

    def _group(self):
        return pwd.getpwnam(self.user).pw_gid

    def start(self):
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "shared_buffers": "16MB",
            "dynamic_shared_memory_type": "mmap",
            "fsync": "off",
            "autovacuum": "off",
            "jit": "off",
        }
        command = [self.programs / "postgres", "-D", self.data]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **self._as())
        self._wait_until_it_answers()

    def _wait_until_it_answers(self):
        import psycopg

        deadline = time.monotonic() + 300
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)
            else:
                return

    def url(self, database="postgres", password=PASSWORD, **query):
        import sqlalchemy as sa

        query = {"host": str(self.folder), "connect_timeout": "300", **query}
        made = sa.URL.create("postgresql", "team", password, database=database, query=query)
        return made.render_as_string(hide_password=False)

    def new_run(self):
        """The URL of a run that nobody has used."""
        return self.url(run=f"r{secrets.token_hex(6)}")

    def stop(self, how=signal.SIGQUIT):
        """SIGQUIT: at once, as if the power had gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(120)


def _postgres_programs():
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    found = str(installed[-1]) if installed else shutil.which("initdb")
    if found is None:
        pytest.skip("PostgreSQL's initdb is not installed")
    return Path(found).resolve().parent


def _reachable_folder(user):
    """A folder with a short name that this user may enter: sockets have short names only."""
    for root in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        if not Path(root).is_dir() or len(root) > 60:
            continue
        folder = Path(tempfile.mkdtemp(prefix="pg-", dir=root))
        if user is None:
            return folder
        shutil.chown(folder, user)
        who = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        tried = subprocess.run(["test", "-w", folder], **who, check=False)
        if tried.returncode == 0:
            return folder
        folder.rmdir()
    pytest.skip("there is no temporary folder that PostgreSQL's user may enter")


def _postgres_user():
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody", "daemon") if name in known)


@pytest.fixture(scope="module")
def postgres():
    """A PostgreSQL server that is running."""
    pytest.importorskip("psycopg")
    programs, user = _postgres_programs(), _postgres_user()
    folder = _reachable_folder(user)
    server = None
    try:
        server = PostgresServer(programs, folder, user)
        server.start()
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
