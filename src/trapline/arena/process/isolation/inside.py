"""The first code inside: gives up every power step by step, then becomes the program.

It runs as a script, copied beside the program, with the standard library only: nothing of the
package is visible there. What to give up comes as JSON in the first argument (`plan.py`). A step
that the kernel refuses ends the process: better not to start than to start open.
"""

import contextlib
import ctypes
import json
import os
import resource
import runpy
import signal
import struct
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
#: Mounts, cgroup, host name, System V IPC, processes, network.
CLONE_EVERYTHING_ELSE = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
EXECUTE, READ_FILE, READ_DIR, IOCTL_DEVICE = 1 << 0, 1 << 2, 1 << 3, 1 << 15
MAKE_DEVICES = 1 << 6 | 1 << 11
#: What a rule may grant on a file; the rest is about folders.
FILE_RIGHTS = EXECUTE | 1 << 1 | READ_FILE | 1 << 14 | IOCTL_DEVICE
#: Rights on files that each Landlock version knows.
RIGHTS_BY_VERSION = (0, 0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)
TCP_BIND_AND_CONNECT = 0b11
ABSTRACT_SOCKETS_AND_SIGNALS = 0b11
VERSION_WITH_NETWORK, VERSION_WITH_SCOPES = 4, 6
NOBODY = 65534

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """`inside.py PLAN FD SUBMISSION`."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    channel = int(sys.argv[2])
    die_with_parent()
    if plan["namespaces"]:
        enter_namespaces(channel, plan)
    if plan["supervise"]:
        supervise(channel)
    if plan["user"] is not None:
        change_user(plan["user"])
    limit_resources(plan["rlimits"])
    check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if plan["landlock"] is not None:
        restrict_files(**plan["landlock"])
    if plan["drop_capabilities"]:
        drop_capabilities()
    if plan["seccomp"]:
        filter_system_calls(bytes.fromhex(plan["seccomp"]))
    become(plan["program"], plan["site"])


def become(program: str, site: str) -> None:
    """Runs the program as `__main__`, with nothing but its neighbours and `site` to import."""
    folder = os.path.dirname(program)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder), site]
    sys.argv = [program, *sys.argv[2:]]
    # By its name: a path would be compiled again.
    name = os.path.basename(program).removesuffix(".py")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def die_with_parent() -> None:
    check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with parent")


def supervise(channel: int) -> None:
    """Forks: the child goes on; this process adopts what the child abandons and ends with it."""
    check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "adopt orphans")
    supervisor = os.getpid()
    signal.signal(signal.SIGTERM, end_everything)
    check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "end with parent")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        # In a fresh pid namespace the first process sees no parent: its number is 0.
        if os.getppid() not in (supervisor, 0):
            os._exit(1)
        return
    os.close(channel)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def end_everything(*_: object) -> None:
    """The controller was killed: what was abandoned inside must not go on. The first process of a
    namespace takes all others along."""
    while os.getpid() != 1 and (inside := descendants(os.getpid())):
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(1)


def descendants(root: int) -> list[int]:
    """All processes that descend from this one."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{root}/task"):
            with open(f"/proc/{root}/task/{task}/children", encoding="utf-8") as file:
                for child in map(int, file.read().split()):
                    found += [child, *descendants(child)]
    return found


def enter_namespaces(channel: int, plan: dict[str, Any]) -> None:
    """A user, network, process tree … of its own; a full scratch folder fills no disk."""
    wanted = CLONE_EVERYTHING_ELSE & ~(0 if plan["own_numbers"] else CLONE_NEWPID)
    owner = ""
    if plan["user"] is not None:  # root, which changes to that user later
        check(_libc.unshare(wanted), "namespaces")
        owner = f",mode=0700,uid={plan['user']},gid={plan['user']}"
    else:
        try:
            new_user_namespace(NOBODY, wanted)
        except OSError:
            # Landlock itself keeps signals in from version 6 on; before, this needs namespaces.
            if landlock_version() < VERSION_WITH_SCOPES:
                raise
            return
    private = MS_REC | MS_PRIVATE
    check(_libc.mount(None, b"/", None, private, None), "private mounts")
    scratch, options = plan["scratch"].encode(), f"size={plan['scratch_mb']}m{owner}".encode()
    flags = MS_NOSUID | MS_NODEV
    check(_libc.mount(b"tmpfs", scratch, b"tmpfs", flags, options), "scratch folder")
    os.chdir(scratch)
    supervise(channel)


def new_user_namespace(inside_id: int, other_namespaces: int = 0) -> None:
    """Unshares, with one user and one group mapped."""
    user, group = os.getuid(), os.getgid()
    check(_libc.unshare(CLONE_NEWUSER | other_namespaces), "namespaces")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inside_id} {user} 1")
    _write("/proc/self/gid_map", f"{inside_id} {group} 1")


def change_user(user: int) -> None:
    """From root to a user that owns nothing; then into a user namespace, if there is one to get."""
    drop_bounding_set()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    # The change made /proc/self root's; an unprivileged process may read its own.
    check(_libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")
    die_with_parent()  # which the change took back
    with contextlib.suppress(OSError):
        new_user_namespace(user)


def limit_resources(limits: dict[str, int]) -> None:
    """Soft and hard at once, so that they cannot be raised again; a lower one stays."""
    for name, value in limits.items():
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # The soft limit of processor time sends a signal that says why, the hard one just kills.
        grace = 1 if which == resource.RLIMIT_CPU and value != hard else 0
        resource.setrlimit(which, (value, value + grace))


def drop_capabilities() -> None:
    with contextlib.suppress(OSError):
        drop_bounding_set()
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    check(_libc.capset(header, bytes(24)), "drop capabilities")


def drop_bounding_set() -> None:
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    if capability == 0:
        check(-1, "drop the bounding set")


def filter_system_calls(code: bytes) -> None:
    kept = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: a length, padding, a pointer.
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(kept))
    check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def landlock_version() -> int:
    """0 where the kernel has none."""
    found = _libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_VERSION)
    return max(0, int(found))


def restrict_files(
    read: list[str], listed: list[str], write: list[str], devices: list[str], driven: list[str]
) -> None:
    """Landlock: nothing but these paths, no TCP, no signal and no abstract socket to outside."""
    version = landlock_version()
    rights = RIGHTS_BY_VERSION[min(version, len(RIGHTS_BY_VERSION) - 1)]
    network = TCP_BIND_AND_CONNECT if version >= VERSION_WITH_NETWORK else 0
    scopes = ABSTRACT_SOCKETS_AND_SIGNALS if version >= VERSION_WITH_SCOPES else 0
    attributes = struct.pack("=QQQ", rights, network, scopes)
    size = 24 if scopes else 16 if network else 8
    rules = _libc.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0)
    check(rules, "landlock")
    for path in read:
        _allow(rules, path, rights & (EXECUTE | READ_FILE | READ_DIR))
    for path in listed:
        _allow(rules, path, rights & READ_DIR)
    for path in write:
        _allow(rules, path, rights & ~MAKE_DEVICES & ~IOCTL_DEVICE)
    for path in devices:
        _allow(rules, path, rights & (READ_FILE | 1 << 1))
    for path in driven:  # a GPU's devices, and where its driver names its threads
        _allow(rules, path, rights & (READ_DIR | FILE_RIGHTS & ~EXECUTE))
    check(_libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # nothing there to be had
        return
    rights = rights if os.path.isdir(path) else rights & FILE_RIGHTS
    attributes = struct.pack("=Qi", rights, descriptor)
    check(_libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_PATH_BENEATH, attributes, 0), path)
    os.close(descriptor)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def check(result: int, what: str) -> None:
    """The kernel refused."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
