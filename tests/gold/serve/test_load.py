"""Two hundred clients at once for five minutes: nothing is lost, memory stays flat."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

CLIENTS, SECONDS = 200, 300
WORDS = ["kernel", "page", "cache", "file", "driver", "memory", "process", "signal", "table", "C"]


def resident(pid):
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


async def ask(client, number, count):
    """One request, streamed or whole; returns the tokens that it got."""
    options = {
        "model": "trapline-demo",
        "prompt": f"The {WORDS[number % 10]} {WORDS[count % 10]}",
        "max_tokens": 4 + (number + count) % 13,
        "seed": number,
    }
    if (number + count) % 2:
        answer = await client.completions.create(**options)
        assert answer.choices[0].finish_reason in ("stop", "length")
        return answer.usage.completion_tokens
    usage, reason = None, None
    stream = await client.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        reason = chunk.choices[0].finish_reason if chunk.choices else reason
    assert reason in ("stop", "length")
    return usage.completion_tokens


async def load(url, pid, clients, seconds):
    """Latencies, tokens, failures by kind, and resident memory every five seconds."""
    import openai

    end = time.monotonic() + seconds
    latencies, failures, memory, tokens = [], Counter(), [], 0

    async def keep_asking(client, number):
        nonlocal tokens
        count = 0
        while time.monotonic() < end:
            began = time.monotonic()
            try:
                new = await ask(client, number, count)
                tokens += new  # not in one statement with `await`: it would read `tokens` before
                latencies.append(time.monotonic() - began)
            except (openai.APIError, AssertionError) as error:
                failures[repr(error)[:100]] += 1
            count += 1

    async def watch():
        while time.monotonic() < end:
            memory.append(resident(pid))
            await asyncio.sleep(5)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx.AsyncClient(limits=limits, timeout=300) as http,
        openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, http_client=http) as client,
    ):
        await asyncio.gather(watch(), *(keep_asking(client, n) for n in range(clients)))
    return sorted(latencies), tokens, failures, memory


def metrics(url):
    text = httpx.get(url.replace("/v1", "/metrics")).text
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 300)
def test_two_hundred_clients_lose_nothing_in_five_minutes():
    command = [sys.executable, "-m", "trapline", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip().split(" at ")[1]
            latencies, tokens, failures, memory = asyncio.run(
                load(url, server.pid, CLIENTS, SECONDS)
            )
            values = metrics(url)
        finally:
            server.send_signal(signal.SIGTERM)
    settled = memory[len(memory) // 5 :]
    half = len(settled) // 2
    before, after = max(settled[:half]), max(settled[half:])
    print(
        f"\n{CLIENTS} clients, {SECONDS} s, {os.cpu_count()} cores: {len(latencies)} answers, "
        f"{tokens} tokens ({tokens / SECONDS:.0f} a second), "
        f"p50 {latencies[len(latencies) // 2]:.1f} s, "
        f"p95 {latencies[len(latencies) * 95 // 100]:.1f} s; "
        f"memory {settled[0]:.0f} MiB after {SECONDS // 5} s, {settled[-1]:.0f} MiB at the end"
    )
    assert not failures
    assert len(latencies) >= CLIENTS
    assert int(values["trapline_generated_tokens_total"]) == tokens
    assert (values["trapline_running"], values["trapline_waiting"]) == ("0", "0")
    assert values["trapline_free_pages"] == values["trapline_pages"]
    assert after <= 1.02 * before + 4
    assert server.returncode == 0
