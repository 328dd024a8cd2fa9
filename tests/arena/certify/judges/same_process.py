"""A judge as many benchmarks have it: in the submission's own process, with the expected values
beside it, and believed whatever it says.

It runs inside the sandbox and only shows what that costs: each attack that it falls for is one that
the real judge does not. The verdict goes out as a frame, or else as an exit code.
"""

import json
import os
import socket
import struct
import sys
import threading
import time

LENGTHS = (2, 7, 64, 100, 2, 7, 64, 100)


class Worker:
    """Says the verdict."""

    def __init__(self, channel):
        self.channel = channel

    def send(self, header, buffers=()):
        text = json.dumps(header).encode()
        self.channel.sendall(struct.pack("<4sIQ", b"TRPL", len(text), 0) + text)


def main():
    worker = Worker(socket.socket(fileno=int(sys.argv[1])))
    sys.path.insert(0, sys.argv[2])
    import numpy as np

    usual = time_of(np.sort, np)[0]
    import solution

    seconds, answers = time_of(solution.sort, np)
    answers += [counted(solution, np, count) for count in (2, 50)]
    passed = settle(np, answers)
    state = "pass" if passed else "fail"
    worker.send({"op": "result", "state": state, "ratio": usual / max(seconds, 1e-9)})
    sys.exit(not passed)


def time_of(sort, np):
    """Seconds on this process's own clock, and the answers with what they should be."""
    rng, seconds, answers = np.random.default_rng(), 0.0, []
    problems = [rng.standard_normal(count) for count in LENGTHS]
    problems = [[values, np.sort(values)] for values in problems]
    for values, want in problems:
        np.sort(values)  # warm, so that nobody pays for the first time
        started = time.perf_counter()
        got = sort(values)
        seconds += time.perf_counter() - started
        answers.append((got, want))
    return seconds, answers


def counted(solution, np, count):
    values = np.random.default_rng().standard_normal(count)
    want = int(np.count_nonzero(np.triu(values[:, None] > values[None, :])))
    return solution.inversions(values), want


def settle(np, answers):
    """Compared when everybody has come to rest: an answer may still become right."""
    while threading.active_count() > 1 or has_children():
        time.sleep(0.01)
    return all(bool(np.all(got == want)) for got, want in answers)


def has_children():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


main()
