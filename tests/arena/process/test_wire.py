"""Frames: what goes in comes out, and no peer can break, stall or grow the other end."""

import json
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trapline.arena.process import wire


def round_trip(value, *, keep_strides=False):
    encoder = wire.Encoder(keep_strides=keep_strides)
    node = json.loads(json.dumps(encoder.encode(value)))
    body = np.frombuffer(b"".join(bytes(memoryview(b)) for b in encoder.buffers), np.uint8)
    return wire.Decoder(body).decode(node)


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and (a == b or a != a)


arrays = hnp.arrays(
    st.sampled_from(
        [np.float16, np.float32, np.float64, np.int8, np.int64, np.bool_, np.complex64]
    ),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(max_size=20)
    | arrays
    | st.sampled_from([np.float32(1.5), np.int64(-3), np.float16("nan")])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
def test_values_survive(value):
    assert same(value, round_trip(value))


@pytest.mark.parametrize(
    "view",
    [
        np.arange(24.0).reshape(4, 6)[::-1, ::2],
        np.arange(24.0).reshape(4, 6).T,
        np.broadcast_to(np.arange(3.0), (5, 3)),
        np.arange(60, dtype=np.int32).reshape(3, 4, 5)[:, 1:3, ::-2],
    ],
)
def test_views_arrive_as_views(view):
    back = round_trip(view, keep_strides=True)
    assert back.strides == view.strides
    assert np.array_equal(back, view)


def test_non_plain_data_is_refused():
    for value in (object(), np.array([object()]), {1, 2}, lambda: 0):
        with pytest.raises(wire.UnsendableError):
            wire.Encoder().encode(value)


def test_nesting_is_bounded_on_both_ends():
    value = []
    for _ in range(wire.MAX_DEPTH + 2):
        value = [value]
    with pytest.raises(wire.UnsendableError):
        wire.Encoder().encode(value)
    node = {"t": "list", "v": []}
    for _ in range(wire.MAX_DEPTH + 2):
        node = {"t": "list", "v": [node]}
    with pytest.raises(wire.WireError):
        wire.Decoder(np.empty(0, np.uint8)).decode(node)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["t", "v", "dtype", "shape", "at", "size"]), inner)
    ),
    max_leaves=15,
)
array_nodes = st.fixed_dictionaries(
    {
        "t": st.sampled_from(["array", "scalar", "int", "float", "dict", "tuple"]),
        "v": json_values,
        "dtype": st.sampled_from(["<f4", "|O", "<f8", "V8", "<M8[s]", "f4,f4", "(2,)f4", "x"])
        | json_values,
        "shape": st.lists(st.integers(-2, 2**40), max_size=4) | json_values,
        "strides": st.none() | st.lists(st.integers(-(2**40), 2**40), max_size=4) | json_values,
        "first": st.integers(-8, 2**62),
        "at": st.integers(-8, 80),
        "size": st.integers(-8, 80),
    }
)


@given(json_values | array_nodes)
def test_no_node_breaks_the_decoder(node):
    """Whatever a peer sends: a value, or a WireError, and never memory that it did not send."""
    body = np.zeros(64, np.uint8)
    try:
        value = wire.Decoder(body).decode(node)
    except wire.WireError:
        return
    if isinstance(value, np.ndarray) and value.size:
        low, high = np.lib.array_utils.byte_bounds(value)
        start = body.ctypes.data
        assert value.dtype.kind in "biufc"
        assert low >= start
        assert high <= start + body.nbytes


@given(st.binary(max_size=200))
def test_no_bytes_break_the_channel(noise):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(noise)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.WireError):
            wire.Channel(ours).receive(time.monotonic() + 60)


@pytest.mark.parametrize(("header", "body"), [(wire.MAX_HEADER + 1, 0), (2, wire.MAX_BODY + 1)])
def test_length_is_checked_before_memory_is_taken(header, body):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.PREFIX.pack(wire.MAGIC, header, body))
        with pytest.raises(wire.WireError, match="larger"):
            wire.Channel(ours).receive(time.monotonic() + 60)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b'{"a": "\\udc80"}', {"a": "?"}),
        (b'{"\\uD800b": ["\\ud83d\\ude00"]}', {"?b": ["\U0001f600"]}),
        (b'{"a": "\xed\xb2\x80"}', {"a": "?"}),
        ('{"é": NaN}'.encode(), None),
    ],
)
def test_invalid_text_is_replaced(text, read):
    """Half a surrogate pair would stop whoever stores or prints it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.PREFIX.pack(wire.MAGIC, len(text), 0) + text)
        header, _ = wire.Channel(ours).receive(time.monotonic() + 60)
    json.dumps(header, ensure_ascii=False).encode()
    assert read is None or header == read


def test_silent_peer_ends_at_the_deadline():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(wire.DeadlineError):
        wire.Channel(ours).receive(time.monotonic() + 0.05)


@pytest.fixture
def lent():
    """A memory file: the controller's end, and the worker's."""
    lender = wire.Lender()
    yield lender, wire.Lent(lender.fd)
    lender.close()


@pytest.mark.parametrize("to_the_worker", [True, False])
def test_large_bodies_travel_through_lent_memory(lent, to_the_worker):
    give, take = lent if to_the_worker else lent[::-1]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        array = np.arange(wire.LENT_FROM + 3).astype(np.uint8)
        wire.Channel(theirs, give=give).send({"op": "x"}, [array, b"end"])
        header, body = wire.Channel(ours, take=take).receive(time.monotonic() + 60)
        array[:] = 0
        give.write([memoryview(bytes(8))])
    assert header["lent"]
    assert (
        body[: wire.LENT_FROM + 3].tobytes() == np.arange(wire.LENT_FROM + 3).astype("u1").tobytes()
    )
    assert body[-3:].tobytes() == b"end"
    assert take.in_use() >= wire.LENT_FROM


def test_lent_memory_cannot_be_taken_away(lent):
    """A reader that maps a file which its peer truncates would die; ours cannot be truncated."""
    with pytest.raises(PermissionError):
        os.ftruncate(lent[1].fd, 0)


def test_body_in_memory_that_was_not_lent_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        text = json.dumps({"lent": True}).encode()
        theirs.sendall(wire.PREFIX.pack(wire.MAGIC, len(text), 64) + text)
        with pytest.raises(wire.WireError, match="not lent"):
            wire.Channel(ours).receive(time.monotonic() + 60)


def test_closed_memory_is_not_mapped():
    """Else the sessions of a few checks fill the address space of a process of mutants."""
    lender = wire.Lender()
    assert _mappings() == 1
    lender.close()
    assert _mappings() == 0


def _mappings():
    return Path("/proc/self/maps").read_text().count("memfd:trapline")
