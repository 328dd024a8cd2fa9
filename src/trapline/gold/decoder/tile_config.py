"""Tile sizes of a decoding step's kernels; docs/lab/decoder.md has the measurements."""

from typing import NamedTuple

from torch import Tensor

from trapline.gold.arithmetic import cdiv

#: Products with fewer weights prefetch all of them before they start. More would evict or delay
#: what the previous kernel still reads.
AHEAD = 1 << 22
#: Bytes of weights that attention prefetches for the product after it: this many stay in the
#: cache until they are read.
AFTER = 1 << 26
#: Outputs and inputs of a split-K program.
SPLIT_K_BLOCK_N, SPLIT_K_BLOCK_K = 64, 256
#: Columns that one program of the split-K reduction adds up.
REDUCE_BLOCK = 256
#: Positions of a beam's tail that are one tile.
SHORT_TAIL = 64
#: Partial results of attention that the last program merges; more take a separate kernel.
MERGE_IN_PLACE = 4


class TileConfig(NamedTuple):
    """Tile sizes of a matrix product."""

    block_b: int  # rows of a program
    block_n: int  # outputs of a program
    block_k: int  # of K at a time, for each part
    split: int  # parts of K within a program
    warps: int
    stages: int


class AttentionTile(NamedTuple):
    """Tile sizes of attention."""

    tile: int  # positions at a time
    warps: int
    registers: int | None  # of a thread; None leaves it to the compiler


def attention_tile(block_d: int, size: int, beams: int, ratio: int, tail: int) -> AttentionTile:
    """Up to 32 KB of keys in registers, for tails of up to `tail` positions.

    Less in float32, for wide heads, and for beams with short tails. Beams with long tails take one
    larger tile and few registers, so that all programs still run at once; this suffices if the
    queries of a group fit into one tile of 16.
    """
    small = size == 2 and block_d <= 64 and beams * ratio <= 16
    if beams > 1 and tail > SHORT_TAIL and small:
        return AttentionTile(2 * SHORT_TAIL, 4, 96)
    most = SHORT_TAIL if beams > 1 or block_d > 64 else 256
    tile = max(16, min(most, (16384 if size == 2 else 2048) // block_d))
    return AttentionTile(tile, 8 if tile * block_d > 16384 else 4, None)


def attention_splits(positions: int, programs: int, processors: int, each: int = 256) -> int:
    """Splits that give every processor two programs, of at least `each` positions."""
    return max(1, min(cdiv(positions, each), 2 * processors // max(programs, 1), 64))


def uses_split_k(rows: int, outputs: int, inputs: int, size: int) -> bool:
    """Whether a product splits K: small weights with many rows, which fit into shared memory.

    With few rows streaming is as fast, unless K is long and there are too few programs.
    """
    if size != 2 or inputs * outputs >= AHEAD:
        return False
    return rows > 16 or inputs > 2 * outputs


def split_k_parts(inputs: int) -> int:
    """Number of partial sums of a split-K product."""
    return cdiv(inputs, SPLIT_K_BLOCK_K)


def rows_per_program(rows: int) -> int:
    """Rows of a program."""
    return min(64, max(8, 1 << (rows - 1).bit_length()))


def tile_config_of(kind: str, rows: int, outputs: int, inputs: int, size: int) -> TileConfig:
    """Tile sizes of a product of `kind`; docs/lab/decoder.md has the measurements.

    Small products have small tiles, so that all processors have work. Larger ones take 64 rows of
    weights a program, or 16 if processors would be idle. Programs of the next kernel must fit
    beside running ones, so there are few stages where every processor has two programs.
    """
    block_b = rows_per_program(rows)
    if size == 4:
        return TileConfig(min(block_b, 16), 16, 32, 2, 4, 2)
    if block_b > 16:
        return _for_many(kind, block_b, outputs, inputs)
    lines = outputs * (2 if kind == "normed_swiglu" else 1)  # rows of weights
    weights = inputs * lines
    if kind == "normed_swiglu":
        if weights < 1 << 23:
            return TileConfig(block_b, 8, 64, 2, 2, 6)
        return (
            TileConfig(block_b, 32, 64, 1, 4, 8)
            if lines <= 1 << 14
            else TileConfig(block_b, 32, 128, 1, 4, 6)
        )
    if kind == "residual_linear" or weights < 1 << 23:
        return TileConfig(block_b, 16, 64, 4, 4, 6)
    if weights < 1 << 24 or outputs > 20_000:
        return TileConfig(block_b, 64, 128, 1, 4, 6)
    return TileConfig(block_b, 16, 128, 4, 4, 4)


def _for_many(kind: str, block_b: int, outputs: int, inputs: int) -> TileConfig:
    """Many rows: a program reads mostly activations, so it takes fewer rows or more weights."""
    if outputs > 20_000:
        return TileConfig(block_b, 128, 64, 1, 4, 4)
    if kind == "normed_swiglu":
        return TileConfig(block_b, 32, 64, 1, 4, 8)
    if kind == "normed_linear":
        return TileConfig(32, 64, 64, 1, 4, 6)
    return (
        TileConfig(16, 64, 64, 1, 4, 8)
        if inputs > 2 * outputs
        else TileConfig(32, 32, 128, 1, 4, 4)
    )


def uses_tma(kind: str, cut: TileConfig, w: Tensor) -> bool:
    """Whether a normed product other than the head loads its operands by TMA.

    For whole tiles, the tile sizes for many rows, and a long K.
    """
    (outputs, inputs), gated = w.shape, kind == "normed_swiglu"
    whole = outputs % ((1 + gated) * cut.block_n) == 0 and inputs % cut.block_k == 0
    many = {(64, 32, 64, 1)} if gated else {(32, 64, 64, 1), (128, 64, 64, 1)}
    return w.element_size() == 2 and whole and inputs >= 1024 and cut[:4] in many


def tma_constants(cut: TileConfig, outputs: int, inputs: int) -> dict[str, int]:
    """Compile-time constants of `normed_linear_tma_kernel`, except the number of square sums."""
    return {
        "BLOCK_B": cut.block_b,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "AHEAD": _next_power_of_2(inputs) if inputs * outputs < AHEAD else 64,
    }


def tile_constants(
    cut: TileConfig,
    kind: str,
    *,
    even: bool,
    outputs: int,
    inputs: int,
    precision: str,
    early: bool,
) -> dict[str, object]:
    """Compile-time constants of all products."""
    weights = inputs * outputs * (2 if kind == "normed_swiglu" else 1)
    return {
        "BLOCK_B": cut.block_b,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "SPLIT": cut.split,
        "EVEN": even,
        "AHEAD": max(64, _next_power_of_2(inputs)) if weights < AHEAD else 64,
        "PRECISION": precision,
        "PDL": early,
    }


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
