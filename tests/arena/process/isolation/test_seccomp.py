"""The filter's code, run by a small interpreter of classic BPF: both machines, on any machine."""

import struct

import pytest

from trapline.arena.errors import MissingError
from trapline.arena.process.isolation import seccomp

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = pytest.mark.parametrize("machine", ARCHITECTURES)
NUMBERS = {
    "read": (0, 63),
    "clone": (56, 220),
    "ptrace": (101, 117),
    "socket": (41, 198),
    "unshare": (272, 97),
    "mount": (165, 40),
    "setuid": (105, 146),
    "process_vm_readv": (310, 270),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "sync": (162, 81),
    "sched_setaffinity": (203, 122),
    "clone3": (435, 435),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
}


def run(machine, name, *arguments, architecture=None):
    """What the filter answers to one system call."""
    number = NUMBERS[name][list(ARCHITECTURES).index(machine)]
    padded = [*arguments, *[0] * (6 - len(arguments))]
    architecture = architecture or ARCHITECTURES[machine]
    data = struct.pack("=iIQ6Q", number, architecture, 0, *padded)
    code = list(struct.iter_unpack("=HBBI", seccomp.program(machine)))
    position, loaded = 0, 0
    while True:
        operation, when_true, when_false, value = code[position]
        position += 1
        if operation == 0x20:
            (loaded,) = struct.unpack_from("=I", data, value)
        elif operation == 0x06:
            return value
        else:
            holds = loaded == value if operation == 0x15 else bool(loaded & value)
            position += when_true if holds else when_false


@MACHINES
def test_reading_is_allowed(machine):
    assert run(machine, "read") == ALLOW


ELSEWHERE = ("ptrace", "socket", "unshare", "mount", "setuid", "process_vm_readv", "keyctl")


@MACHINES
@pytest.mark.parametrize("name", [*ELSEWHERE, "io_uring_setup", "bpf", "perf_event_open", "sync"])
def test_calls_that_reach_other_processes_are_refused(machine, name):
    assert run(machine, name) == EPERM


@MACHINES
def test_processor_is_chosen_by_the_judge_alone(machine):
    assert run(machine, "sched_setaffinity") == EPERM


@MACHINES
def test_call_of_another_architecture_ends_the_process(machine):
    assert run(machine, "read", architecture=0x40000003) == KILL


@MACHINES
@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("clone", (0x003D0F00,), (0x10000011,)),  # threads, but no namespaces
        ("socketpair", (1,), (16,)),  # Unix sockets only
        ("ioctl", (3, 0x5401), (3, 0x5412)),  # no input to a terminal
    ],
)
def test_arguments_decide(machine, name, allowed, refused):
    assert run(machine, name, *allowed) == ALLOW
    assert run(machine, name, *refused) == EPERM


@MACHINES
def test_clone3_returns_enosys(machine):
    assert run(machine, "clone3") == ENOSYS


def test_unknown_machine_is_missing():
    with pytest.raises(MissingError, match="riscv64"):
        seccomp.program("riscv64")
