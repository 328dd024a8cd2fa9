"""Runs `attempt()` of SUBMISSION/attack.py inside and sends back what came of it, as JSON."""

import json
import runpy
import socket
import sys


def main():
    channel, folder = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    sys.submission, sys.channel = folder, channel
    try:
        attempt = runpy.run_path(folder + "/attack.py")["attempt"]
        answer = {"got": attempt()}
    except Exception as error:
        answer = {"error": type(error).__name__, "why": str(error)}
    channel.sendall(json.dumps(answer).encode() + b"\n")
    channel.recv(1)


main()
