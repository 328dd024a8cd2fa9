"""The server, asked by the official client: answers, streams, errors, limits and disconnects."""

import json
import socket
import struct
import threading
import time

import httpx
import pytest

from trapline.gold import Sampling
from trapline.gold.serve.app import Limits

TALK = [{"role": "system", "content": "be"}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="session")
def openai():
    """Imported by the process that runs these tests, not by each that collects them: 2 s."""
    import openai

    return openai


@pytest.fixture(scope="session")
def client(served, openai):
    _, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_completions_are_those_of_the_decoder(tiny, client):
    options = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.1}
    way = Sampling(seed=7, logit_bias={97: 2.0}, repetition_penalty=1.1, min_p=0.01, **options)
    found = client.completions.create(
        model="tiny",
        prompt=["Once", "Twice"],
        max_tokens=12,
        n=2,
        seed=7,
        logit_bias={"97": 2},
        extra_body={"repetition_penalty": 1.1, "min_p": 0.01},
        **options,
    )
    expected = tiny.generate(["Once", "Twice"], max_new_tokens=12, sampling=way, n=2)
    assert [choice.text for choice in found.choices] == [answer.text for answer in expected]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (9, 48)
    assert found.object == "text_completion"
    ids = tiny.tokenizer.encode("Once")
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=5, temperature=0)
    assert by_ids.choices[0].text == tiny.generate("Once", max_new_tokens=5)[0].text


def test_chats_go_through_the_template(tiny, client):
    found = client.chat.completions.create(
        model="tiny", messages=TALK, max_completion_tokens=9, temperature=0
    )
    (expected,) = tiny.generate(TALK, max_new_tokens=9)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    by_parts = client.chat.completions.create(
        model="tiny", messages=[TALK[0], *parts], max_tokens=9, temperature=0
    )
    assert by_parts.choices[0].message.content == expected.text
    assert by_parts.usage == found.usage


def test_streams_give_the_same_text_in_pieces(client):
    options = {"model": "tiny", "max_tokens": 20, "seed": 3, "n": 2}
    usage = {"stream_options": {"include_usage": True}, "stream": True}
    whole = client.chat.completions.create(messages=TALK, **options)
    texts, reasons = ["", ""], [None, None]
    *chunks, last = client.chat.completions.create(messages=TALK, **options, **usage)
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant"] * 2
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert last.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    plain = client.completions.create(prompt="Once", **options)
    texts = ["", ""]
    for chunk in client.completions.create(prompt="Once", stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in plain.choices]


def test_stop_strings_and_end_tokens_end_an_answer(tiny, client):
    (answer,) = tiny.generate("Once", max_new_tokens=12)
    stop = answer.text[4:6]
    expected = tiny.generate("Once", max_new_tokens=12, stop=stop)[0]
    options = {"model": "tiny", "prompt": "Once", "max_tokens": 12, "temperature": 0}
    found = client.completions.create(stop=stop, **options).choices[0]
    assert (found.text, found.finish_reason) == (expected.text, "stop")
    ended = client.completions.create(logit_bias={"256": 100}, **options).choices[0]
    assert (ended.text, ended.finish_reason) == ("", "stop")


def test_logprobs_have_the_shapes_of_the_api(tiny, client):
    (expected,) = tiny.generate("Once", max_new_tokens=4, logprobs=3)
    found = client.completions.create(
        model="tiny", prompt="Once", max_tokens=4, temperature=0, logprobs=3
    ).choices[0]
    assert found.logprobs.token_logprobs == pytest.approx(
        [one.logprob for one in expected.logprobs], abs=1e-5
    )
    assert [len(top) for top in found.logprobs.top_logprobs] == [3] * 4
    assert found.logprobs.text_offset[0] == 0
    chat = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 3
    assert entries[0].top_logprobs[0].logprob == pytest.approx(entries[0].logprob, abs=1e-5)
    chunks = client.chat.completions.create(
        model="tiny", messages=TALK, max_tokens=3, temperature=0, logprobs=True, stream=True
    )
    streamed = [e.logprob for c in chunks for e in c.choices[0].logprobs.content]
    assert streamed == pytest.approx([entry.logprob for entry in entries], abs=1e-5)


def test_models_health_and_metrics(served, client, openai):
    _, url = served
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    client.completions.create(model="tiny", prompt="a", max_tokens=2)
    text = httpx.get(f"{url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(values['trapline_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert int(values["trapline_generated_tokens_total"]) >= 2
    assert (
        values["trapline_first_token_seconds_count"]
        == values['trapline_first_token_seconds_bucket{le="+Inf"}']
    )


WRONG = [
    ({"model": "x"}, 404, "model", "there is no model 'x'; this server has 'tiny'"),
    ({"colour": "red"}, 400, "colour", "this server has no parameter 'colour'"),
    ({"prompt": []}, 400, "prompt", "prompt is empty"),
    ({"prompt": ""}, 400, None, "the prompt is empty"),
    ({"prompt": 5}, 400, "prompt", "prompt: "),
    ({"prompt": [999]}, 400, None, "outside the vocabulary of 258"),
    ({"prompt": ["a"] * 65, "n": 2}, 400, "n", "prompts times n must be at most 128"),
    ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 2000}, 400, "max_tokens", "max_tokens must be at most 1024, got 2000"),
    ({"prompt": "a" * 4096}, 400, "max_tokens", "exceed the model's context of 4096"),
    ({"temperature": -1}, 400, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, 400, "temperature", "valid number"),
    ({"top_p": 0}, 400, None, r"top_p must be in \(0, 1\], got 0"),
    ({"stop": [""]}, 400, None, "a stop string cannot be empty"),
    ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "must map token ids to numbers"),
    ({"logit_bias": {"999": 1}}, 400, None, "logit_bias token 999 is outside"),
    ({"logprobs": 99}, 400, "logprobs", "less than or equal to 20"),
    ({"best_of": 3}, 400, "best_of", "best_of must equal n"),
    ({"echo": True}, 400, "echo", "echo: "),
    ({"stream_options": {"x": 1}}, 400, "stream_options", "no parameter 'stream_options.x'"),
]


@pytest.mark.parametrize(("change", "status", "param", "sentence"), WRONG)
def test_wrong_requests_get_the_errors_of_the_api(client, change, status, param, sentence, openai):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, **change}
    with pytest.raises(openai.APIStatusError, match=sentence) as caught:
        client.post("/completions", body=body, cast_to=object)
    assert caught.value.status_code == status
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.body["param"] == param


NESTED = []
for _ in range(600):
    NESTED = [NESTED]
WRONG_CHATS = [
    ({"messages": []}, "messages: "),
    ({"messages": [{"content": "a"}]}, "message 0 must be like"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "list of text parts"),
    ({"messages": [{"role": "user", "content": 5}]}, "content of message 0 must be a text"),
    ({"messages": [{"role": "user", "deep": NESTED}]}, "recursion"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"tools": []}, "this server has no parameter 'tools'"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG_CHATS)
def test_wrong_chats_are_refused(client, change, sentence, openai):
    body = {"model": "tiny", "messages": TALK, **change}
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.post("/chat/completions", body=body, cast_to=object)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"n": 1e999}'])
def test_bodies_that_are_no_requests_are_refused(served, body):
    _, url = served
    found = httpx.post(f"{url}/v1/completions", content=body)
    assert found.status_code == 400
    assert found.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_are_refused(served):
    _, url = served
    for found, status in (
        (httpx.get(f"{url}/v1/embeddings"), 404),
        (httpx.get(f"{url}/v1/completions"), 405),
    ):
        assert found.status_code == status
        assert "/v1/" in found.json()["error"]["message"]


def test_large_and_slow_bodies_are_refused(tiny, started):
    limits = Limits(body_bytes=1000, body_seconds=0.3, prompt_tokens=20)
    with started(tiny, limits=limits) as (_, url):
        address = f"{url}/v1/completions"
        large = json.dumps({"model": "tiny", "prompt": "a" * 2000}).encode()
        found = httpx.post(address, content=large)
        assert (found.status_code, "1000 bytes" in found.text) == (413, True)

        def in_parts():
            for start in range(0, len(large), 100):
                yield large[start : start + 100]

        assert httpx.post(address, content=in_parts()).status_code == 413

        def slowly():
            yield b"{"
            time.sleep(1.0)
            yield b"}"

        assert httpx.post(address, content=slowly()).status_code == 408
        long = httpx.post(address, json={"model": "tiny", "prompt": "a" * 21})
        assert long.json()["error"]["code"] == "context_length_exceeded"


def test_the_api_key_is_required(tiny, started, openai):
    with started(tiny, api_key="schlüssel") as (_, url):
        for given in ("Bearer wrong", "Bearer schlüsse", "Bearer", "Basic schlüssel"):
            headers = {"Authorization": given.encode()}
            found = httpx.get(f"{url}/v1/models", headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(f"{url}/v1/models").headers["WWW-Authenticate"] == "Bearer"
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        headers = {"Authorization": "Bearer schlüssel".encode()}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
    with started(tiny, api_key="key") as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key")
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            openai.OpenAI(base_url=f"{url}/v1", api_key="kex").models.list()


def long_request(url, path="/v1/completions", **change):
    """A connection that has asked for a long streamed answer."""
    host, port = url.removeprefix("http://").split(":")
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1000, "stream": True}
    body |= {"temperature": 0, **change}
    data = json.dumps(body).encode()
    made = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    made.sendall(head.encode() + data)
    return made


@pytest.mark.parametrize("kill", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_cache(tiny, started, eventually, stream, kill):
    with started(tiny) as (service, url):
        engine = service.worker.engine
        book = engine.pool.book
        gone = long_request(url, stream=stream, n=3)
        eventually(lambda: engine.running == 3)
        assert book.free_pages < book.num_pages
        seen = b""
        while stream and b"data:" not in seen:
            seen += gone.recv(10_000)
        if kill:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        eventually(lambda: engine.running == 0 and book.free_pages == book.num_pages, 5)
        eventually(lambda: service.worker.active == 0)
        assert service.worker.generated < 3000
        assert service.metrics.disconnects == 1
        again = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert again.status_code == 200


def test_a_full_server_says_when_to_come_back(tiny, started, eventually):
    with started(tiny, rows=1, limits=Limits(answers=2)) as (service, url):
        with long_request(url), long_request(url):
            eventually(lambda: service.worker.active == 2)
            found = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"})
            assert found.status_code == 429
            assert found.headers["Retry-After"] == "1"
            assert found.json()["error"]["type"] == "rate_limit_error"
            assert service.worker.engine.waiting == 1
        eventually(lambda: service.worker.active == 0)
        found = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"})
        assert found.status_code == 200


def test_shutting_down_ends_running_answers_and_takes_no_new_ones(tiny, started, openai):
    with started(tiny) as (service, url):
        with httpx.Client() as kept:
            assert kept.get(f"{url}/health").status_code == 200
            service.draining = True
            found = kept.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "a"})
            assert (found.status_code, found.headers["Retry-After"]) == (503, "1")
            assert kept.get(f"{url}/health").status_code == 503
            service.draining = False
        texts = []

        def ask():
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
            for chunk in client.completions.create(
                model="tiny", prompt="Once", max_tokens=60, stream=True, temperature=0
            ):
                texts.append(chunk.choices[0])

        asking = threading.Thread(target=ask)
        asking.start()
        while not texts:
            time.sleep(0.005)
    asking.join()
    assert texts[-1].finish_reason == "length"


def test_a_failing_answer_does_not_affect_the_others(tiny, started, monkeypatch, openai):
    with started(tiny) as (service, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        banned = dict.fromkeys(map(str, range(258)), -1e38)
        banned |= {"0": float("-inf")}
        body = {"model": "tiny", "prompt": "a", "logit_bias": dict.fromkeys(banned, float("-inf"))}
        raw = json.dumps(body).replace("-Infinity", "-1e999")
        found = httpx.post(f"{url}/v1/completions", content=raw)
        assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
        streamed = httpx.post(
            f"{url}/v1/completions", content=raw.replace("{", '{"stream": true, ', 1)
        )
        assert '"server_error"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")

        def broken():
            raise RuntimeError("the device is gone")

        engine = service.worker.engine
        step = engine.step
        monkeypatch.setattr(engine, "step", broken)
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            client.completions.create(model="tiny", prompt="a")
        monkeypatch.setattr(engine, "step", step)
        assert client.completions.create(model="tiny", prompt="a").choices[0].text
        assert engine.pool.book.free_pages == engine.pool.book.num_pages
