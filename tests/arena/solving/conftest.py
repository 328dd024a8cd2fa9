"""A server on loopback that speaks the OpenAI API, and misbehaves on request."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


def chunk(content=None, finish=None, usage=None):
    choices = (
        [] if usage else [{"index": 0, "delta": {"content": content}, "finish_reason": finish}]
    )
    body = {
        "id": "1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
    }
    return json.dumps({**body, "usage": usage})


class Provider(ThreadingHTTPServer):
    """Answers with `replies` in turn (texts, or functions of the request); `faults` come first,
    one a request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.faults, self.requests, self.keys = [], [], [], []
        self.finish = "stop"
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        """Silent."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            fault = self.server.faults.pop(0) if self.server.faults else None
            reply = None if fault else self.server.replies[0]
            if not fault and len(self.server.replies) > 1:
                self.server.replies.pop(0)
        if fault:
            FAULTS[fault](self)
        else:
            self.stream(reply(body) if callable(reply) else reply)

    def refuse(self, code, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no"}}')

    def stream(self, text, cut=False):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        size = max(1, len(text) // 5)
        parts = [chunk(text[i : i + size]) for i in range(0, len(text), size)]
        if cut:
            parts = parts[:2]
        else:
            parts += [chunk("", self.server.finish), chunk(usage=usage_of(text)), "[DONE]"]
        for part in parts:
            self.wfile.write(f"data: {part}\n\n".encode())

    def malformed(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b"data: {not json\n\n")

    def sleepy(self):
        time.sleep(4.0)


def usage_of(text):
    return {"prompt_tokens": 100, "completion_tokens": len(text), "total_tokens": 100 + len(text)}


FAULTS = {
    "busy": lambda h: h.refuse(429, Retry_After="0.01"),
    "broken": lambda h: h.refuse(500),
    "timeout": Handler.sleepy,
    "truncated": lambda h: h.stream("half an answer that never ends", cut=True),
    "malformed": Handler.malformed,
    "forbidden": lambda h: h.refuse(401),
}


@pytest.fixture
def provider(monkeypatch):
    """Reached directly, whatever proxy this machine is told to use."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    server = Provider()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
