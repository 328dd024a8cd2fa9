"""How attention and the small products of a short step are cut; docs/components/decoder.md."""

from typing import NamedTuple

from torch import Tensor

from trapline.gold.arithmetic import cdiv

#: Products with fewer weights ask for all of them before they may begin. More would only push out
#: of the cache, or delay, what the kernel before is still reading.
AHEAD = 1 << 22
#: Bytes of weights that attention asks for on behalf of the product behind it, which has more of
#: them than it asks for itself: so many stay in the cache until they are read.
AFTER = 1 << 26
#: Outputs and inputs of a program that holds its weights.
SPLIT_K_BLOCK_N, SPLIT_K_BLOCK_K = 64, 256
#: Of a row of planes that one program adds up.
REDUCE_BLOCK = 256
#: Positions of a beam's tail that are one tile.
SHORT_TAIL = 64
#: Parts of an answer of attention that the last of their programs merges; more take a kernel.
MERGE_IN_PLACE = 4


class TileConfig(NamedTuple):
    """How a product is cut."""

    block_b: int  # rows of a program
    block_n: int  # outputs of a program
    block_k: int  # of K at a time and part
    split: int  # parts of K within a program
    warps: int
    stages: int


class AttentionTile(NamedTuple):
    """How attention is cut."""

    tile: int  # positions at a time
    warps: int
    registers: int | None  # of a thread; None is as many as the compiler likes


def attention_tile(block_d: int, size: int, beams: int, ratio: int, tail: int) -> AttentionTile:
    """Up to 32 KB of keys in registers, for tails of up to `tail` positions.

    Less where products are slow, where heads are wide, and where beams have short tails. Long ones
    would be waited for a second time; then threads take so few registers that all programs still
    run at once, which is enough where the queries of a group are one tile of 16.
    """
    small = size == 2 and block_d <= 64 and beams * ratio <= 16
    if beams > 1 and tail > SHORT_TAIL and small:
        return AttentionTile(2 * SHORT_TAIL, 4, 96)
    most = SHORT_TAIL if beams > 1 or block_d > 64 else 256
    tile = max(16, min(most, (16384 if size == 2 else 2048) // block_d))
    return AttentionTile(tile, 8 if tile * block_d > 16384 else 4, None)


def attention_splits(positions: int, programs: int, processors: int, each: int = 256) -> int:
    """As many as give every processor two programs, of `each` positions or more."""
    return max(1, min(cdiv(positions, each), 2 * processors // max(programs, 1), 64))


def uses_split_k(rows: int, outputs: int, inputs: int, size: int) -> bool:
    """Whether all processors together hold a product's weights: small ones of many rows.

    With few rows streaming is as fast, unless K is so long that there are too few programs.
    """
    if size != 2 or inputs * outputs >= AHEAD:
        return False
    return rows > 16 or inputs > 2 * outputs


def split_k_parts(inputs: int) -> int:
    """Into how many partial sums such a product is cut."""
    return cdiv(inputs, SPLIT_K_BLOCK_K)


def rows_per_program(rows: int) -> int:
    """Rows of a program."""
    return min(64, max(8, 1 << (rows - 1).bit_length()))


def tile_config_of(kind: str, rows: int, outputs: int, inputs: int, size: int) -> TileConfig:
    """Small products are cut fine, so that all processors have a part; docs/components/decoder.md.

    Of larger ones a program takes 64 rows of weights at a time; where that would leave processors
    without one, 16. The next kernel's programs must find room beside those that still run, or they
    crowd on the processors that are free first: few stages where every processor has two programs.
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
    """The batch is what a program reads most of: it takes a part of it, or more weights."""
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
    """Whether the copy engine fetches a product behind a norm that is not the head's.

    Boxes are whole, of the cuts for many rows (of a tree too), and of a long K.
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
    """What all products know at compile time."""
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
