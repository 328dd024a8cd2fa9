"""Session logs: tokens, turns and time in every form, and nothing from a log that is not one."""

import json
import os

import pytest

from trapline.arena.judge.intake import take_in
from trapline.arena.record import Origin
from trapline.arena.runs import field
from trapline.arena.runs.sessions import MOST_BYTES, parse_session, read_session

HOUR = 1_800_000_000_000


def lines(*events):
    return "".join(json.dumps(event) + "\n" for event in events)


def at(seconds):
    """The same time as an ISO date."""
    return f"2027-01-15T08:{seconds // 60:02d}:{seconds % 60:02d}.000Z"


def claude():
    """Three lines of one reply, then another; the tool's answer is no prompt."""

    def said(seconds, name, output, content):
        usage = {
            "input_tokens": 10,
            "cache_creation_input_tokens": 200,
            "cache_read_input_tokens": 3000,
            "output_tokens": output,
        }
        message = {
            "id": name,
            "role": "assistant",
            "model": "m-1",
            "usage": usage,
            "content": content,
        }
        return {
            "type": "assistant",
            "sessionId": "s",
            "uuid": f"{name}{seconds}",
            "timestamp": at(seconds),
            "message": message,
        }

    def asked(seconds, content):
        return {
            "type": "user",
            "sessionId": "s",
            "uuid": f"u{seconds}",
            "timestamp": at(seconds),
            "message": {"role": "user", "content": content},
        }

    return lines(
        {"type": "summary", "summary": "a session", "leafUuid": "x"},
        asked(0, "write it"),
        said(10, "a", 1, [{"type": "thinking"}]),
        said(11, "a", 70, [{"type": "text"}]),
        said(12, "a", 70, [{"type": "tool_use"}]),
        asked(20, [{"type": "tool_result", "content": "ok"}]),
        said(30, "b", 30, [{"type": "text"}]),
        asked(330, "and now the tests"),
        said(340, "c", 5, [{"type": "text"}]),
    )


def pi():
    """The header's time is that of the export, later than the messages."""

    def entry(seconds, message):
        return {
            "type": "message",
            "id": f"e{seconds}",
            "parentId": "p",
            "timestamp": at(seconds),
            "message": {**message, "timestamp": HOUR},
        }

    usage = {
        "input": 100,
        "output": 40,
        "cacheRead": 900,
        "cacheWrite": 0,
        "totalTokens": 1040,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0, "total": 0},
    }
    return lines(
        {"type": "session", "version": 3, "id": "x", "timestamp": at(3000), "cwd": "."},
        entry(5, {"role": "user", "content": [{"type": "text", "text": "write it"}]}),
        entry(25, {"role": "assistant", "model": "m-2", "usage": usage, "content": []}),
        entry(26, {"role": "toolResult", "toolName": "bash", "content": []}),
        entry(65, {"role": "assistant", "model": "m-2", "usage": usage, "content": []}),
    )


def opencode():
    def message(role, begin, end, **more):
        info = {"id": f"{role}{begin}", "sessionID": "s", "role": role, **more}
        info["time"] = {"created": HOUR + begin, "completed": HOUR + end}
        return {"info": info, "parts": []}

    tokens = {"input": 50, "output": 20, "reasoning": 6, "cache": {"read": 400, "write": 10}}
    document = {
        "info": {"id": "s", "title": "t"},
        "messages": [
            message("user", 0, 0),
            message("assistant", 500, 8000, modelID="m-3", tokens=tokens, cost=0.25),
            message("assistant", 8500, 12000, modelID="m-3", tokens=tokens, cost=0.5),
        ],
    }
    return json.dumps(document, indent=2)


LOGS = {
    "claude": (
        claude(),
        "m-1",
        Origin(
            input_tokens=3 * 3210, cached_tokens=3 * 3000, output_tokens=105, turns=3, seconds=40.0
        ),
    ),
    "pi": (
        pi(),
        "m-2",
        Origin(input_tokens=2000, cached_tokens=1800, output_tokens=80, turns=2, seconds=60.0),
    ),
    "opencode": (
        opencode(),
        "m-3",
        Origin(
            input_tokens=920,
            cached_tokens=800,
            output_tokens=52,
            turns=2,
            seconds=12.0,
            cost_usd=0.75,
        ),
    ),
}


@pytest.mark.parametrize("harness", LOGS)
def test_log_tells_its_cost(harness):
    text, model, cost = LOGS[harness]
    found = parse_session(text)
    assert (found.harness, found.model) == (harness, model)
    assert found.origin == cost


def test_stream_of_a_turn_without_roles():
    event = {
        "type": "turn.completed",
        "usage": {"input_tokens": 90, "cached_input_tokens": 60, "output_tokens": 7},
    }
    cost = parse_session(lines(event, event)).origin
    assert cost == Origin(input_tokens=180, cached_tokens=120, output_tokens=14, turns=2)


ODD = {
    "empty": "",
    "prose": "the model thought for a while\n",
    "numbers": "[1, 2, 3]\n4\n",
    "broken": '{"message": {"role": "assistant", "usage": {"output": 5',
    "no usage": lines({"message": {"role": "assistant"}}),
    "deep": "[" * 100_000,
    "negative": lines({"role": "assistant", "usage": {"input": -5, "output": -1}}),
    "text": lines({"role": "assistant", "usage": {"input": "5", "output": "many"}}),
    "nan": '{"role": "assistant", "usage": {"input": NaN, "output": NaN}}\n',
    "endless": '{"role": "assistant", "usage": {"input": 1, "output": 1e400}}\n',
    "absurd": lines({"role": "assistant", "usage": {"input": 1, "output": 10**30}}),
    "other types": lines({"message": [], "info": 3, "role": ["assistant"], "time": "now"}),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_log_tells_nothing(kind):
    assert parse_session(ODD[kind]) is None


def test_odd_times_and_models_do_not_matter():
    usage = {"input": 1, "output": 2}
    events = [
        {"role": "user", "timestamp": "yesterday", "content": 3},
        {"role": "assistant", "timestamp": at(50), "usage": usage, "model": ["m"]},
        {"role": "assistant", "timestamp": at(20), "usage": usage, "model": "\x1b[2J"},
        {"role": "assistant", "timestamp": float(10**40), "usage": usage},
    ]
    found = parse_session(lines(*events))
    assert (found.model, found.origin.turns, found.origin.seconds) == ("", 3, 0.0)


def test_link_and_pipe_and_huge_file_are_not_read(tmp_path):
    (tmp_path / "log").write_text(pi())
    (tmp_path / "link").symlink_to("log")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.write(pi().encode())
        file.truncate(MOST_BYTES + 1)
    assert read_session(tmp_path / "log") is not None
    found = [read_session(tmp_path / name) for name in ("link", "pipe", "huge", "none", "")]
    assert found == [None] * 5


@pytest.fixture
def answer(tmp_path):
    folder = tmp_path / "field" / "somebody" / "kv_cache"
    (folder / ".trapline").mkdir(parents=True)
    (folder / "solution.py").write_text("x = 1\n")
    return folder


def request_of(answer):
    (request,) = field.find_entries(answer.parents[1], [])
    return request


@pytest.mark.parametrize("place", ["session.jsonl", ".trapline/session.jsonl"])
def test_log_beside_an_answer_is_its_cost_and_no_part_of_it(answer, place):
    (answer / place).write_text(pi())
    request = request_of(answer)
    assert (request.harness, request.model, request.origin) == ("pi", *LOGS["pi"][1:])
    assert list(take_in(answer).files) == ["solution.py"]


def test_record_of_the_harness_goes_before_the_log(answer):
    record = {
        "harness": "h",
        "model": "n",
        "status": "solved",
        "input_tokens": 5,
        "output_tokens": 6,
        "seconds": 2.5,
        "turns": 4,
    }
    (answer / ".trapline/record.json").write_text(json.dumps(record))
    (answer / "session.jsonl").write_text(pi())
    request = request_of(answer)
    assert (request.harness, request.model) == ("h", "n")
    assert request.origin == Origin(
        status="solved", input_tokens=5, output_tokens=6, turns=4, seconds=2.5
    )
    (answer / ".trapline/record.json").write_text(json.dumps({"harness": "h", "seconds": -1}))
    assert request_of(answer).origin == LOGS["pi"][2]
