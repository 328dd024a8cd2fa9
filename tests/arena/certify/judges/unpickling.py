"""A judge that lets a child run the submission and unpickles what it answers.

It runs inside the sandbox and only shows what unpickling costs.
"""

import json
import os
import pickle
import socket
import struct
import sys

import numpy as np


def main():
    channel, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    rng = np.random.default_rng()
    passed = True
    for count in (2, 7, 64):
        values = rng.standard_normal(count)
        got = answer(folder, values)
        passed = np.array_equal(got, np.sort(values)) and passed
    text = json.dumps({"op": "result", "state": "pass" if passed else "fail"}).encode()
    channel.sendall(struct.pack("<4sIQ", b"TRPL", len(text), 0) + text)


def answer(folder, values):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        import solution

        os.write(writing, pickle.dumps(solution.sort(values)))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(text)


main()
