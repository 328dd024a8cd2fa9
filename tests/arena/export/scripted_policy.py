"""Evaluates an exported verifiers package with a scripted policy; needs verifiers installed.

    python scripted_policy.py PACKAGE REPLIES OUT COPIES SEED

REPLIES is a JSON list of [task, name, reply]. Each is played COPIES times, all of them at once, and
OUT gets a JSON list with the name, the reward, the metrics and the error of every rollout. A local
server plays the model: verifiers' own client asks it, as it would ask any other.
"""

import asyncio
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import verifiers.v1 as vf


class ScriptedHarness(vf.Harness[vf.HarnessConfig]):
    """One chat turn: sends the prompt to the model and ends."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=600) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(0 if answer.is_success else 1, "", answer.text)


class Model(BaseHTTPRequestHandler):
    """Answers with the reply that the request's model name stands for."""

    replies: list[str] = []

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        asked = json.loads(self.rfile.read(length))
        message = {"role": "assistant", "content": self.replies[int(asked["model"])]}
        body = json.dumps(
            {
                "id": "scripted",
                "object": "chat.completion",
                "created": 0,
                "model": asked["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 512


async def play(env, tasks, name, index, reply_of, url):
    context = vf.ModelContext(
        model=str(index),
        client=vf.EvalClientConfig(base_url=url, api_key_var="SCRIPTED_KEY"),
    )
    episode = await env.run_episode(tasks[reply_of], context)
    (trace,) = episode.traces
    error = trace.last_error
    return {
        "name": name,
        "task": reply_of,
        "reward": None if error else trace.reward,
        "metrics": dict(trace.metrics),
        "error": f"{error.type}: {error.message}" if error else "",
    }


async def evaluate(package, replies, copies, seed, url):
    config = vf.SingleAgentEnvConfig.model_validate(
        {
            "taskset": {"id": package, "task": {"seed": seed}},
            "agent": {"harness": {"id": "scripted_policy"}, "runtime": {"type": "subprocess"}},
        }
    )
    env = vf.load_environment(config)
    tasks = {task.data.id: task for task in env.taskset}
    async with env.serving():
        return await asyncio.gather(
            *(
                play(env, tasks, name, index, task, url)
                for index, (task, name, _) in enumerate(replies)
                for _ in range(copies)
            )
        )


def main():
    package, replies_file, out, copies, seed = sys.argv[1:]
    replies = json.loads(Path(replies_file).read_text())
    Model.replies = [reply for _, _, reply in replies]
    server = Server(("127.0.0.1", 0), Model)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    rows = asyncio.run(evaluate(package, replies, int(copies), int(seed), url))
    Path(out).write_text(json.dumps(rows))


__all__ = ["ScriptedHarness"]

if __name__ == "__main__":
    main()
