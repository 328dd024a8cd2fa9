"""The first code inside: gives up every power step by step, then becomes the program.

It runs as a script, copied beside the program, with the standard library only: nothing of the
package is visible there. What to give up comes as JSON in the first argument.
"""

import ctypes
import json
import os
import resource
import runpy
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """`inside.py PLAN FD SUBMISSION`."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    die_with_parent()
    if plan["supervise"]:
        supervise(int(sys.argv[2]))
    limit_resources(plan["rlimits"])
    check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    become(plan["program"], plan["site"])


def become(program: str, site: str) -> None:
    """Runs the program as `__main__`, with nothing but its neighbours and `site` to import."""
    folder = os.path.dirname(program)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder), site]
    sys.argv = [program, *sys.argv[2:]]
    runpy.run_path(program, run_name="__main__")


def die_with_parent() -> None:
    """No judge, no submission: it ends when whoever started it ends."""
    check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "die with parent")


def supervise(channel: int) -> None:
    """Forks: the child goes on; this process adopts what the child abandons and ends with it."""
    check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "adopt orphans")
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent()
        if os.getppid() != supervisor:
            os._exit(1)
        return
    os.close(channel)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def limit_resources(limits: dict[str, int]) -> None:
    """Soft and hard at once, so that they cannot be raised again; a lower one stays."""
    for name, value in limits.items():
        which = getattr(resource, name)
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def check(result: int, what: str) -> None:
    """The kernel refused: better not to start than to start open."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
