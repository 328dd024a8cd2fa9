"""Storage of codes: the runtime plane (four per byte), 34-byte blocks, and five trits per byte.

Kernels read the plane: row by row, codes 4i … 4i+3 in byte i, the first lowest. Blocks (a float16
scale and 128 codes) and base 3 are file formats.
"""

import numpy as np

from trapline.gold.arithmetic import cdiv

BLOCK = 128
BLOCK_BYTES = 2 + BLOCK // 4
_PLACES = np.array([0, 2, 4, 6], dtype=np.uint8)
_POWERS = np.array([81, 27, 9, 3, 1], dtype=np.uint16)


def pack(codes: np.ndarray) -> np.ndarray:
    """codes (…, n) → uint8 (…, ceil(n / 4)); spare places hold code 0."""
    columns = codes.shape[-1]
    slots = np.ones((*codes.shape[:-1], cdiv(columns, 4) * 4), dtype=np.uint8)
    slots[..., :columns] += codes.astype(np.uint8)
    first, second, third, fourth = (slots[..., place::4] for place in range(4))
    packed: np.ndarray = first | second << 2 | third << 4 | fourth << 6
    return packed


def unpack(packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The codes of this shape. Two set bits are not a code and raise ValueError."""
    slots = (packed[..., None] >> _PLACES) & 3
    slots = slots.reshape(*packed.shape[:-1], 4 * packed.shape[-1])[..., : shape[-1]]
    if np.any(slots == 3):
        raise ValueError("these bytes are not packed ternary codes: two set bits are not a code")
    codes: np.ndarray = slots.astype(np.int8) - np.int8(1)
    return codes


def to_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """codes (N, K), K a multiple of 128, and scales (N, K / 128) → uint8 (N, K / 128 · 34)."""
    rows, columns = codes.shape
    if columns % BLOCK:
        raise ValueError(f"blocks need a width that is a multiple of {BLOCK}, got {columns}")
    groups = columns // BLOCK
    blocks = np.empty((rows, groups, BLOCK_BYTES), dtype=np.uint8)
    blocks[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
    blocks[..., 2:] = pack(codes).reshape(rows, groups, BLOCK // 4)
    return blocks.reshape(rows, groups * BLOCK_BYTES)


def from_blocks(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """codes and scales of `to_blocks`; a row must be a whole number of blocks."""
    rows, size = blocks.shape
    if size % BLOCK_BYTES:
        raise ValueError(f"a row of {size} bytes does not divide into {BLOCK_BYTES}-byte blocks")
    parts = blocks.reshape(rows, size // BLOCK_BYTES, BLOCK_BYTES)
    scales = np.ascontiguousarray(parts[..., :2]).view("<f2")[..., 0].astype(np.float16)
    plane = np.ascontiguousarray(parts[..., 2:]).reshape(rows, -1)
    return unpack(plane, (rows, plane.shape[1] * 4)), scales


def to_base3(codes: np.ndarray) -> np.ndarray:
    """Five trits per byte, most significant first: 1.6 bits per code; padding holds code 0.

    A value b below 3⁵ = 243 is stored as ⌈b · 256 / 243⌉, so that each digit is the carry of a
    multiplication by 3.
    """
    columns = codes.shape[-1]
    trits = np.ones((*codes.shape[:-1], cdiv(columns, 5) * 5), dtype=np.uint16)
    trits[..., :columns] = (codes + 1).astype(np.uint16)
    grouped = trits.reshape(*codes.shape[:-1], trits.shape[-1] // 5, 5)
    values = grouped @ _POWERS
    stored: np.ndarray = ((values * 256 + 242) // 243).astype(np.uint8)
    return stored


def from_base3(stored: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The codes of this shape that `to_base3` stored."""
    rest: np.ndarray = stored.astype(np.uint16)
    digits = []
    for _ in range(5):
        rest = rest * 3
        digits.append(rest >> 8)
        rest = rest & 255
    trits = np.stack(digits, axis=-1).reshape(*stored.shape[:-1], 5 * stored.shape[-1])
    codes: np.ndarray = trits[..., : shape[-1]].astype(np.int8) - np.int8(1)
    return codes
