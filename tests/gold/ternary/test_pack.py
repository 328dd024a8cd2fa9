"""Storage: what goes in comes out, byte by byte as documented."""

import numpy as np
import pytest

from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.ternary import oracle
from trapline.gold.ternary.api import pack, ternarize, unpack
from trapline.gold.ternary.pack import (
    BLOCK_BYTES,
    from_base3,
    from_blocks,
    to_base3,
    to_blocks,
)

RNG = np.random.default_rng(8)


def codes(*shape: int) -> np.ndarray:
    return RNG.integers(-1, 2, shape).astype(np.int8)


@pytest.mark.parametrize("shape", [(1,), (6,), (3, 4), (2, 3, 19), (0, 5), (3, 0)])
def test_packing_matches_the_oracle_and_round_trips(shape: tuple[int, ...]) -> None:
    given = codes(*shape)
    packed = pack(given)
    assert packed.dtype == np.uint8
    assert np.array_equal(packed, oracle.pack(given))
    assert np.array_equal(unpack(packed, shape), given)
    assert np.array_equal(oracle.unpack(packed, shape), given)


def test_packed_bytes_of_a_known_example() -> None:
    assert pack(np.array([-1, 0, 1, 1, -1], dtype=np.int8)).tolist() == [0b10100100, 0b01010100]


def test_every_byte_unpacks_or_raises() -> None:
    for byte in range(256):
        digits = [(byte >> shift) & 3 for shift in (0, 2, 4, 6)]
        packed = np.array([byte], dtype=np.uint8)
        if 3 in digits:
            with pytest.raises(ValueError, match="not packed ternary codes"):
                unpack(packed, (4,))
        else:
            assert unpack(packed, (4,)).tolist() == [digit - 1 for digit in digits]


def test_blocks_are_34_bytes_of_128() -> None:
    given, scales = ternarize(RNG.standard_normal((3, 384)).astype(np.float32))
    blocks = to_blocks(given, scales)
    assert blocks.shape == (3, 3 * BLOCK_BYTES)
    assert BLOCK_BYTES == 34
    assert blocks[0, :2].tobytes() == scales[0, 0].tobytes()
    again = from_blocks(blocks)
    assert np.array_equal(again[0], given)
    assert np.array_equal(again[1], scales)


def test_blocks_of_other_sizes_raise() -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        to_blocks(codes(2, 300), np.ones((2, 3), dtype=np.float16))
    with pytest.raises(ValueError, match="34-byte"):
        from_blocks(np.zeros((2, 36), dtype=np.uint8))


@pytest.mark.parametrize("shape", [(5,), (3, 10), (2, 3, 128), (4, 1), (3, 0)])
def test_base_three_round_trips(shape: tuple[int, ...]) -> None:
    given = codes(*shape)
    stored = to_base3(given)
    assert stored.shape == (*shape[:-1], -(-shape[-1] // 5))
    assert np.array_equal(from_base3(stored, shape), given)


def test_base_three_holds_every_five_codes() -> None:
    every = np.array(np.meshgrid(*[[-1, 0, 1]] * 5)).reshape(5, -1).T.astype(np.int8)
    stored = to_base3(every)
    assert len(np.unique(stored)) == 243
    assert np.array_equal(from_base3(stored, every.shape), every)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (RangeError, lambda: pack(np.array([2], dtype=np.int8))),
        (DTypeError, lambda: pack(np.array([1]))),
        (ShapeError, lambda: unpack(np.zeros((4, 2), dtype=np.uint8), (2, 16))),
        (ShapeError, lambda: unpack(np.zeros((4, 2), dtype=np.uint8), (4, 9))),
        (DTypeError, lambda: unpack(np.zeros((4, 2), dtype=np.int16), (4, 8))),
    ],
)
def test_invalid_arguments_raise(error: type[Exception], call: object) -> None:
    assert callable(call)
    with pytest.raises(error):
        call()
