"""Each defence, proved by an attack that succeeds once the defence is left out."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import trapline.arena
from trapline.arena.process import sandbox
from trapline.arena.process.isolation import cgroups, landlock, plan, stage
from trapline.arena.process.isolation.running import descendants
from trapline.arena.process.sandbox import SandboxLimits

STRONG = pytest.mark.parametrize("level", ["bubblewrap", "landlock"])
EVERY = pytest.mark.parametrize("level", ["bubblewrap", "landlock", "process"])
SOURCE = Path(trapline.arena.__file__).resolve()
MEGABYTE = 1 << 20


class TestFiles:
    READ_SOURCE = f"""
        def attempt():
            return len(open({str(SOURCE)!r}).read())
    """

    @STRONG
    def test_source_is_not_readable(self, attack, level):
        assert attack(level, self.READ_SOURCE)["error"] in ("FileNotFoundError", "PermissionError")

    @pytest.mark.parametrize(
        ("level", "without"),
        [("bubblewrap", ["files"]), ("landlock", ["landlock"]), ("process", [])],
    )
    def test_source_is_readable_without_file_rules(self, attack, level, without):
        assert attack(level, self.READ_SOURCE, without) == {"got": len(SOURCE.read_text())}

    @EVERY
    def test_trapline_cannot_be_imported(self, attack, level):
        assert attack(level, "def attempt(): import trapline")["error"] == "ModuleNotFoundError"

    @EVERY
    def test_only_packages_asked_for_can_be_imported(self, attack, level):
        code = "def attempt(): import numpy, scipy; return scipy.__name__"
        assert attack(level, code)["error"] == "ModuleNotFoundError"
        assert attack(level, code, packages=("scipy",)) == {"got": "scipy"}

    @STRONG
    def test_nothing_but_the_scratch_folder_is_writable(self, attack, level):
        code = """
        import os, sys
        PLACES = [sys.submission, sys.path[0], sys.path[-1], os.path.dirname(os.__file__),
                  "/", "/usr", "/etc", "/var", "/dev", "/root", "/home"]
        def attempt():
            open("mine", "w").write("kept")
            return [place for place in PLACES if writable(place)] + [open("mine").read()]
        def writable(place):
            try:
                open(place + "/new", "w").close()
                return True
            except OSError:
                return False
        """
        assert attack(level, code) == {"got": ["kept"]}

    @STRONG
    def test_links_out_of_the_scratch_folder_lead_nowhere(self, attack, level):
        code = """
        import os
        def attempt():
            os.symlink("/etc/passwd", "link")
            opened = []
            for how in (lambda: open("link"), lambda: os.link("/etc/passwd", "hard"),
                        lambda: open("../../../../../../etc/passwd"), lambda: open("/etc/shadow")):
                try:
                    how()
                    opened.append("opened")
                except OSError:
                    opened.append("refused")
            return opened
        """
        assert attack(level, code) == {"got": ["refused"] * 4}

    @STRONG
    def test_no_device_and_no_terminal(self, attack, level):
        code = """
        import os
        def attempt():
            return [path for path in ("/dev/mem", "/dev/kmsg", "/dev/tty", "/dev/vda", "/dev/sda",
                                      "/dev/fuse", "/dev/kvm") if opens(path)]
        def opens(path):
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                return True
            except OSError:
                return False
        """
        assert attack(level, code) == {"got": []}


class TestNetwork:
    CONNECT = """
        import socket
        def attempt():
            socket.create_connection(("127.0.0.1", {port}), timeout=10).close()
            return "connected"
    """

    @pytest.fixture
    def server(self):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            yield listening.getsockname()[1]

    @STRONG
    def test_no_connection(self, attack, server, level):
        assert attack(level, self.CONNECT.format(port=server))["error"] == "PermissionError"

    @STRONG
    def test_network_namespace_alone_prevents_connections(self, attack, server, level):
        outcome = attack(level, self.CONNECT.format(port=server), ["seccomp"])
        assert outcome["error"] in ("OSError", "ConnectionRefusedError", "PermissionError")

    @pytest.mark.parametrize(
        ("level", "without"),
        [
            ("bubblewrap", ["seccomp", "net"]),
            ("landlock", ["seccomp", "namespaces", "landlock"]),
            ("process", []),
        ],
    )
    def test_connection_works_without_namespace_and_filter(self, attack, server, level, without):
        assert attack(level, self.CONNECT.format(port=server), without) == {"got": "connected"}

    @STRONG
    def test_no_names_are_resolved_and_no_unix_socket_made(self, attack, level):
        code = """
        import socket
        def attempt():
            refused = 0
            for how in (lambda: socket.getaddrinfo("example.org", 80),
                        lambda: socket.socket(socket.AF_UNIX),
                        lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)):
                try:
                    how()
                except OSError:
                    refused += 1
            return refused
        """
        assert attack(level, code) == {"got": 3}


class TestProcesses:
    @STRONG
    def test_controller_cannot_be_signalled(self, attack, level):
        code = f"import os\ndef attempt(): os.kill({os.getpid()}, 0)"
        assert attack(level, code)["error"] in ("ProcessLookupError", "PermissionError")

    def test_plain_process_can_signal_the_controller(self, attack):
        code = f"import os\ndef attempt(): os.kill({os.getpid()}, 0)"
        assert attack("process", code) == {"got": None}

    LIST = """
        import os
        def attempt():
            return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    """

    def test_proc_shows_the_sandbox_only(self, attack):
        assert attack("bubblewrap", self.LIST)["got"] == [1, 2]

    def test_landlock_shows_no_proc(self, attack):
        assert attack("landlock", self.LIST)["error"] == "PermissionError"

    def test_plain_process_sees_the_controller(self, attack):
        assert os.getpid() in attack("process", self.LIST)["got"]

    TRACE = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def attempt():
            child = os.fork()
            if child == 0:
                os._exit(libc.ptrace(0, 0, None, None) & 1)
            traced = -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return [traced, libc.unshare(0x10000000), libc.chroot(b"/"),
                    libc.mount(b"t", b"/", b"tmpfs", 0, None)]
    """

    @STRONG
    def test_no_tracing_no_namespaces_no_mounts(self, attack, level):
        assert attack(level, self.TRACE) == {"got": [-1, -1, -1, -1]}

    @STRONG
    def test_without_the_filter_tracing_works(self, attack, level):
        assert attack(level, self.TRACE, ["seccomp"])["got"][0] == 0

    def test_every_privilege_is_gone(self, attack):
        code = """
        import os
        def attempt():
            text = open("/proc/self/status").read()
            lines = dict(line.split(":\\t") for line in text.splitlines() if ":\\t" in line)
            names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
            return [int(lines[name], 16) for name in names] + [os.getuid() != 0, os.geteuid() != 0]
        """
        got = attack("bubblewrap", code)["got"]
        assert got == [0, 0, 0, 0, 0, 1, 2, True, True]

    def test_root_becomes_another_user_outside_too(self, start):
        if os.getuid() != 0:
            pytest.skip("only root has another user to become")
        attack = start("bubblewrap", "def attempt(): return 1")
        attack.outcome()
        users = {Path(f"/proc/{pid}").stat().st_uid for pid in descendants(attack.running.pid)}
        assert any(user >= 61184 for user in users)

    @STRONG
    def test_no_process_becomes_root(self, attack, level):
        assert attack(level, "import os\ndef attempt(): os.setuid(0)")["error"] == "PermissionError"


class TestSurroundings:
    SECRETS = """
        import os
        def attempt():
            return dict(os.environ)
    """

    @EVERY
    def test_environment_is_a_fixed_list(self, attack, level, monkeypatch):
        monkeypatch.setenv("SOME_API_KEY", "secret")
        got = attack(level, self.SECRETS)["got"]
        known = {"HOME", "TMPDIR", "PATH", "LANG", "PWD", "LC_CTYPE", "OLDPWD"}
        threads = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
        assert set(got) <= known | threads

    DESCRIPTORS = """
        import os, sys
        def attempt():
            return [fd for fd in range(3, 256) if valid(fd) and fd != sys.channel.fileno()]
        def valid(fd):
            try:
                os.fstat(fd)
                return True
            except OSError:
                return False
    """

    @EVERY
    def test_no_descriptor_but_the_channel_comes_along(self, attack, level, tmp_path):
        with (tmp_path / "open").open("w") as file:
            os.set_inheritable(file.fileno(), True)
            assert attack(level, self.DESCRIPTORS) == {"got": []}

    @EVERY
    def test_import_path_holds_neither_submission_nor_working_folder(self, attack, level):
        code = """
        import os, sys
        def attempt():
            return sys.submission in sys.path or "" in sys.path or os.getcwd() in sys.path
        """
        assert attack(level, code) == {"got": False}

    @EVERY
    def test_scratch_folder_is_empty_and_private(self, attack, level):
        code = "import os\ndef attempt(): return os.listdir()"
        assert attack(level, code) == {"got": []}


class TestBombs:
    """Every bomb is small enough to be harmless where the defence is left out."""

    SMALL = SandboxLimits(memory_mb=128, processes=16, file_mb=4, cpu_seconds=600)
    ALLOCATE = f"""
        def attempt():
            return len(bytearray({1500 * MEGABYTE}))
    """

    @EVERY
    def test_address_space_is_limited(self, attack, level):
        assert attack(level, self.ALLOCATE, limits=self.SMALL)["error"] in ("MemoryError", "died")

    FORK = """
        import os, signal, time
        def attempt():
            made = []
            try:
                for _ in range(60):
                    pid = os.fork()
                    if pid == 0:
                        time.sleep(600)
                        os._exit(0)
                    made.append(pid)
            except OSError:
                pass
            return len(made)
    """

    @STRONG
    def test_forks_are_limited(self, attack, level):
        if not sandbox.bounds_processes(level):
            pytest.skip("rlimits do not bind root, and this machine lends no control group")
        assert attack(level, self.FORK, limits=self.SMALL)["got"] < 30

    @pytest.fixture
    def as_other_user(self, monkeypatch):
        """The level landlock for root, with an interpreter that other users can read."""
        system = Path("/usr/bin/python3")
        if os.getuid() != 0 or not system.exists():
            pytest.skip("it takes root and an interpreter outside of root's home folder")
        monkeypatch.setattr(plan, "PYTHON", str(system))
        monkeypatch.setattr(sandbox, "_way", lambda *_: (landlock.by_user, ()))

    def test_forks_of_root_are_limited_without_a_control_group(self, as_other_user, attack):
        assert attack("landlock", self.FORK, ["cgroup"], self.SMALL)["got"] < 30

    def test_forks_of_root_continue_without_limits(self, as_other_user, attack):
        without = ["cgroup", "rlimits"]
        assert attack("landlock", self.FORK, without, self.SMALL) == {"got": 60}

    @STRONG
    def test_forks_continue_without_limits(self, attack, level):
        assert attack(level, self.FORK, ["rlimits", "cgroup"], self.SMALL) == {"got": 60}

    THREADS = """
        import threading
        def attempt():
            gate, made = threading.Event(), []
            try:
                for _ in range(60):
                    made.append(threading.Thread(target=gate.wait, daemon=True))
                    made[-1].start()
            except RuntimeError:
                made.pop()
            gate.set()
            return len(made)
    """

    def test_threads_are_limited(self, attack):
        assert attack("bubblewrap", self.THREADS, limits=self.SMALL)["got"] < 30

    WRITE = f"""
        def attempt():
            with open("big", "wb") as file:
                for _ in range(8):
                    file.write(bytes({MEGABYTE}))
            return "written"
    """

    @EVERY
    def test_file_size_is_limited(self, attack, level):
        assert attack(level, self.WRITE, limits=self.SMALL)["error"] == "OSError"

    @EVERY
    def test_file_grows_without_rlimits(self, attack, level):
        assert attack(level, self.WRITE, ["rlimits"], self.SMALL) == {"got": "written"}

    MANY = f"""
        def attempt():
            for number in range(16):
                with open(f"big{{number}}", "wb") as file:
                    file.write(bytes({2 * MEGABYTE}))
            return "written"
    """

    @STRONG
    def test_scratch_folder_is_limited(self, attack, level):
        assert attack(level, self.MANY, scratch_mb=8)["error"] == "OSError"
        assert attack(level, self.MANY, scratch_mb=64) == {"got": "written"}

    TOUCH = f"""
        def attempt():
            kept = b"x" * {400 * MEGABYTE}
            return len(kept)
    """

    def test_memory_of_all_processes_is_limited(self, start):
        if not cgroups.counts_memory():
            pytest.skip("this machine lends no control group for memory")
        attack = start("bubblewrap", self.TOUCH, limits=self.SMALL)
        assert attack.outcome()["error"] == "died"
        wait_until(lambda: not attack.running.alive())
        assert attack.running.reason() == "ended by the kernel: it used more memory than allowed"

    @pytest.mark.parametrize("level", ["process"])
    def test_processor_time_is_limited(self, start, level):
        limits = SandboxLimits(cpu_seconds=1)
        attack = start(level, "def attempt():\n    while True: pass", limits=limits)
        assert attack.outcome()["error"] == "died"
        wait_until(lambda: not attack.running.alive())
        assert "processor time" in attack.running.reason()


class TestEnd:
    DAEMON = """
        import os, time
        def attempt():
            for _ in range(3):
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        time.sleep(600)
                    os._exit(0)
                os.wait()
            return "spread"
    """

    @EVERY
    def test_kill_ends_grandchildren_in_other_sessions(self, start, level):
        attack = start(level, self.DAEMON)
        assert attack.outcome() == {"got": "spread"}
        inside = descendants(attack.running.pid)
        assert len(inside) >= 5
        attack.running.kill()
        assert [pid for pid in inside if alive(pid)] == []
        assert attack.running.reason() == "we ended it"

    CONTROLLER = """
import socket, sys, time
from pathlib import Path
from trapline.arena.process import sandbox
ours, theirs = socket.socketpair()
program, folder, gpu = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "True"
running = sandbox.launch(sandbox.Launch(sys.argv[1], program, folder, theirs, gpu=gpu))
ours.makefile().readline()
print(running.pid, flush=True)
time.sleep(600)
    """

    @pytest.mark.parametrize(
        ("level", "gpu"), [("bubblewrap", False), ("landlock", False), ("landlock", True)]
    )
    def test_everything_ends_with_a_killed_controller(self, start, level, gpu, tmp_path):
        first = start(level, self.DAEMON)
        first.running.kill()
        attacker = str(Path(__file__).with_name("attacker.py"))
        command = [sys.executable, "-c", self.CONTROLLER, level, attacker, str(tmp_path), str(gpu)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
            inside = descendants(int(controller.stdout.readline()))
            assert len(inside) >= 5
            controller.kill()
        wait_until(lambda: not any(alive(pid) for pid in inside))
        stage.remove_leftovers()

    def test_sandbox_outlives_the_thread_that_started_it(self, start):
        started = []
        code = "def attempt(): return 1"
        thread = threading.Thread(target=lambda: started.append(start("bubblewrap", code)))
        sandbox.why_not("bubblewrap")
        thread.start()
        thread.join()
        assert started[0].outcome() == {"got": 1}
        assert started[0].running.alive()

    @EVERY
    def test_exit_and_signal_have_different_reasons(self, start, level):
        exits = start(level, "import os\ndef attempt(): os._exit(7)")
        exits.outcome()
        wait_until(lambda: not exits.running.alive())
        assert exits.running.reason() == "exited with code 7"
        dies = start(level, "import os\ndef attempt(): os.abort()")
        dies.outcome()
        wait_until(lambda: not dies.running.alive())
        assert dies.running.reason().startswith("ended by SIGABRT")

    @EVERY
    def test_large_output_neither_blocks_nor_uses_memory(self, start, level):
        code = """
        import sys
        def attempt():
            for number in range(400):
                sys.stdout.write("x" * 99_999 + "\\n")
            print("the end", flush=True)
            return "done"
        """
        attack = start(level, code)
        assert attack.outcome() == {"got": "done"}
        wait_until(lambda: attack.running.output().endswith("the end\n"))
        assert len(attack.running.output()) <= 16 << 10


class TestPause:
    HOPPING = """
        import os
        def attempt():
            hop()
            return "hopping"
        def hop():
            if os.fork() == 0:
                for _ in range(200_000):
                    if os.fork():
                        os._exit(0)
                os._exit(0)
            os.wait()
    """

    @EVERY
    def test_constantly_forking_process_can_be_paused(self, start, level):
        if not cgroups.can_freeze():
            pytest.skip("without a freezer such a process can only be chased")
        attack = start(level, self.HOPPING)
        assert attack.outcome() == {"got": "hopping"}
        attack.running.pause()
        assert stands_still(attack.running) or not attack.running.alive()
        attack.running.resume()

    def test_paused_process_can_resume(self, start):
        code = """
        import sys
        def attempt():
            sys.channel.recv(1)
            return "awake"
        """
        attack = start("bubblewrap", code)
        attack.running.pause()
        attack.channel.sendall(b"x")
        attack.running.resume()
        assert attack.outcome() == {"got": "awake"}

    ROAMING = """
        import os, sys
        def roam():
            try:
                os.sched_setaffinity(0, range(os.cpu_count()))
            except OSError as error:
                return type(error).__name__
            return "moved"
        def attempt():
            sys.channel.recv(1)
            return [roam(), len(os.sched_getaffinity(0))]
    """

    def roamed(self, start, level, without=()):
        attack = start(level, self.ROAMING, without)
        attack.running.keep_to({min(os.sched_getaffinity(0))})
        attack.channel.sendall(b"x")
        return attack.outcome()["got"]

    @STRONG
    def test_process_stays_on_the_processor_that_it_was_given(self, start, level):
        assert self.roamed(start, level) == ["PermissionError", 1]

    @STRONG
    def test_without_the_filter_it_runs_where_it_likes(self, start, level):
        processors = len(os.sched_getaffinity(0))
        assert self.roamed(start, level, ["seccomp"]) == ["moved", processors]

    @EVERY
    def test_paused_process_can_be_killed(self, start, level):
        attack = start(level, "def attempt(): return 1")
        attack.outcome()
        inside = descendants(attack.running.pid)
        attack.running.pause()
        attack.running.kill()
        assert not any(alive(pid) for pid in inside)


class TestMemory:
    GROW = f"""
        import sys
        def attempt():
            sys.channel.recv(1)
            kept = b"x" * {200 * MEGABYTE}
            del kept
            return "grown"
    """

    @EVERY
    def test_peak_is_seen_after_it_has_passed_and_can_be_reset(self, start, level):
        attack = start(level, self.GROW)
        before = attack.running.peak_bytes()
        attack.channel.sendall(b"x")
        assert attack.outcome() == {"got": "grown"}
        assert attack.running.peak_bytes() - before > 150 * MEGABYTE
        attack.running.reset_peak()
        assert attack.running.peak_bytes() - before < 100 * MEGABYTE

    CHILD = f"""
        import os
        def attempt():
            if os.fork() == 0:
                kept = b"x" * {200 * MEGABYTE}
                os._exit(0)
            os.wait()
            return "grown"
    """

    def test_memory_of_a_child_that_has_ended_counts(self, start):
        if not cgroups.counts_memory():
            pytest.skip("without a control group nobody remembers what an ended process used")
        attack = start("bubblewrap", self.CHILD)
        assert attack.outcome() == {"got": "grown"}
        assert attack.running.peak_bytes() > 150 * MEGABYTE


def stands_still(running):
    """Nobody comes and nobody goes."""
    before = descendants(running.pid)
    time.sleep(0.1)
    return descendants(running.pid) == before


def state(pid):
    """The kernel's letter for what a process does; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def alive(pid):
    """A zombie that nobody has collected yet is dead."""
    return state(pid) not in "XZ"


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
