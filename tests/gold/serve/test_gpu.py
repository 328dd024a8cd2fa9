"""The server over a model on a GPU: several clients at once, whole and streamed answers."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import pytest

pytestmark = pytest.mark.needs_gpu


def text_of(url, number):
    """The answer to one of the prompts; streamed for odd numbers."""
    body = {
        "model": "tiny",
        "prompt": "a b c d"[: 1 + number % 7],
        "max_tokens": 12,
        "temperature": 0,
        "stream": bool(number % 2),
    }
    request = Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=60) as answer:
        said = answer.read().decode()
    if not number % 2:
        return json.loads(said)["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


def test_a_gpu_serves_what_the_cpu_serves(tiny, started):
    there = copy.deepcopy(tiny).to("cuda")
    there.tokenizer = tiny.tokenizer
    texts = []
    for decoder in (tiny, there):
        with started(decoder) as (_, url), ThreadPoolExecutor(8) as clients:
            texts.append(list(clients.map(lambda number: text_of(url, number), range(28))))
    assert texts[0] == texts[1]
    assert all(texts[0])
