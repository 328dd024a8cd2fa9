"""A seccomp filter: the system calls a numerical program needs, and no others.

Each entry is a name with its number on x86_64 and on aarch64 ("-": does not exist there). What is
missing on purpose: sockets other than the inherited channel, namespaces, mounts, ptrace and reading
other processes' memory, io_uring, bpf, perf, keys, modules, System V memory, changing users or
capabilities, `sync`, with which one could slow the neighbours down, and the choice of a processor,
which is the judge's while it takes times.
"""

import errno
import struct

from trapline.arena.errors import MissingError

_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69,
pwritev 296 70, preadv2 327 286, pwritev2 328 287, open 2 -, openat 257 56, openat2 437 437,
close 3 57, close_range 436 436, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
readlinkat 267 78, getcwd 79 17, chdir 80 49, fchdir 81 50, lseek 8 62, dup 32 23, dup2 33 -,
dup3 292 24, pipe 22 -, pipe2 293 59, fcntl 72 25, flock 73 32, fsync 74 82, fdatasync 75 83,
ftruncate 77 46, truncate 76 45, fallocate 285 47, fadvise64 221 223, getdents 78 -,
getdents64 217 61, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35,
rename 82 -, renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -,
symlinkat 266 36, chmod 90 -, fchmod 91 52, fchmodat 268 53, umask 95 166, utimensat 280 88,
statfs 137 43, fstatfs 138 44, copy_file_range 326 285, sendfile 40 71, getxattr 191 8,
lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13,
mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, brk 12 214, madvise 28 233,
msync 26 227, mincore 27 232, mlock 149 228, munlock 150 229, memfd_create 319 279,
membarrier 324 283, mbind 237 235, get_mempolicy 239 236, set_mempolicy 238 237,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -,
eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
signalfd 282 -, signalfd4 289 74, futex 202 98, futex_waitv 449 449, set_robust_list 273 99,
get_robust_list 274 100, set_tid_address 218 96, rseq 334 293,
fork 57 -, vfork 58 -, execve 59 221, exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95,
kill 62 129, tkill 200 130, tgkill 234 131, getpid 39 172, gettid 186 178, getppid 110 173,
getpgid 121 155, getpgrp 111 -, setpgid 109 154, getsid 124 156, setsid 112 157, getuid 102 174,
geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150,
getgroups 115 158, getpriority 140 141, sched_yield 24 124, sched_getaffinity 204 123,
sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, prctl 157 167, arch_prctl 158 -,
getrlimit 97 163, setrlimit 160 164, prlimit64 302 261, getrusage 98 165, sysinfo 99 179,
uname 63 160, getrandom 318 278, getcpu 309 168, capget 125 90,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, rt_sigpending 127 136, sigaltstack 131 132, pause 34 -,
restart_syscall 219 128, alarm 37 -, setitimer 38 103, getitimer 36 102,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, gettimeofday 96 169,
nanosleep 35 101, time 201 -, times 100 153, timer_create 222 107, timer_settime 223 110,
timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
sendmsg 46 211, recvmsg 47 212, sendto 44 206, recvfrom 45 207, shutdown 48 210,
getsockopt 55 209, setsockopt 54 208, getsockname 51 204, getpeername 52 205,
"""
#: Allowed with a condition on an argument, or refused in a way of its own.
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_IOCTL = (16, 29)
_SOCKETPAIR = (53, 199)
_SET_AFFINITY = (203, 122)
_SOCKET, _CONNECT, _BIND, _LISTEN, _ACCEPT4 = (41, 198), (42, 203), (49, 200), (50, 201), (288, 242)
_SEQPACKET_CLOEXEC = 0x80005

#: Machine → (column of the tables, AUDIT_ARCH of <linux/audit.h>).
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
#: CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES = 0x7E020080
_AF_UNIX = 1
#: TIOCSTI and TIOCLINUX put characters into a terminal's input.
_TERMINAL_INPUT = (0x5412, 0x541C)


def program(machine: str, gpu: bool = False) -> bytes:
    if machine not in _MACHINES:
        raise MissingError(f"no seccomp filter has been written for {machine!r}")
    column, architecture = _MACHINES[machine]
    code = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_EQUAL, architecture, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
    ]
    for number in _numbers(column):
        code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
    code += _when(_CLONE[column], _refuse_if_bits(0, _NEW_NAMESPACES))
    code += _when(_SOCKETPAIR[column], _allow_if_equal(0, _AF_UNIX))
    code += _when(_IOCTL[column], _refuse_if_equal(1, _TERMINAL_INPUT))
    # clone3 hides its flags behind a pointer; the C library falls back to clone when told so.
    code += _when(_CLONE3[column], [_op(_RETURN, _ERRNO | errno.ENOSYS)])
    code += _gpu_calls(column) if gpu else []
    code.append(_op(_RETURN, _ERRNO | errno.EPERM))
    return b"".join(code)


def _gpu_calls(column: int) -> list[bytes]:
    """The CUDA driver makes a local socket over which its own children could get descriptors.

    Only sockets of that kind, which cannot send without a connection; connecting always fails.
    Nothing on a GPU is timed by its processor.
    """
    code = _when(_SOCKET[column], _allow_if_both(0, _AF_UNIX, 1, _SEQPACKET_CLOEXEC))
    for number in (_BIND, _LISTEN, _ACCEPT4, _SET_AFFINITY):
        code += [_op(_EQUAL, number[column], 0, 1), _op(_RETURN, _ALLOW)]
    return code + _when(_CONNECT[column], [_op(_RETURN, _ERRNO | errno.ENOENT)])


def _allow_if_both(first: int, value: int, second: int, other: int) -> list[bytes]:
    refused = _op(_RETURN, _ERRNO | errno.EPERM)
    checks = [_argument(first), _op(_EQUAL, value, 1, 0), refused]
    return [*checks, _argument(second), _op(_EQUAL, other, 1, 0), refused, _op(_RETURN, _ALLOW)]


def _numbers(column: int) -> list[int]:
    rows = [entry.split() for entry in _ALLOWED.replace("\n", " ").split(",") if entry.strip()]
    return [int(row[1 + column]) for row in rows if row[1 + column] != "-"]


def _op(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Runs `body`, which returns on every path, for this system call alone."""
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> bytes:
    """The low half; both machines are little-endian, and no high half matters to these calls."""
    return _op(_LOAD, _ARGUMENTS + 8 * index)


def _refuse_if_bits(index: int, bits: int) -> list[bytes]:
    refused = _op(_RETURN, _ERRNO | errno.EPERM)
    return [_argument(index), _op(_ANY_BIT, bits, 0, 1), refused, _op(_RETURN, _ALLOW)]


def _refuse_if_equal(index: int, values: tuple[int, ...]) -> list[bytes]:
    code = [_argument(index)]
    for value in values:
        code += [_op(_EQUAL, value, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM)]
    return [*code, _op(_RETURN, _ALLOW)]


def _allow_if_equal(index: int, value: int) -> list[bytes]:
    refused = _op(_RETURN, _ERRNO | errno.EPERM)
    return [_argument(index), _op(_EQUAL, value, 1, 0), refused, _op(_RETURN, _ALLOW)]
