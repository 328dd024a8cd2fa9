"""The short step of a decoder: its kernels, launched in order on buffers that never move.

Five launches a layer: a product behind a norm; attention with everything around it; a product added
to the stream; the gated product behind a norm; another one added to the stream. `kernels_step` and
`kernels_attend` say how; here is for which models, and how the work is cut. Small products of many
rows that are added to the stream are two launches instead (`held`).
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from trapline.gold.decoder.cuts import AFTER, AHEAD, MERGED, attend_cut, rows_of, splits_of
from trapline.gold.decoder.forward import Rows
from trapline.gold.decoder.held import Held
from trapline.gold.decoder.kernels_attend import attend_kernel, merge_kernel
from trapline.gold.decoder.kernels_boxed import boxed_gated_kernel, boxed_kernel
from trapline.gold.decoder.kernels_step import (
    added_kernel,
    embed_kernel,
    gated_kernel,
    pick_kernel,
    scaled_kernel,
)
from trapline.gold.decoder.layers import Layer
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.sampling import ranked
from trapline.gold.device import may_start_early, processors
from trapline.gold.softmax_topk import kernels as topk
from trapline.gold.softmax_topk.api import TopK

LOG2_E = 1.4426950408889634
#: Query heads to a key head that a tile of `kernels_attend` has room for.
MOST_HEADS = 16


class Cut(NamedTuple):
    """How a product is cut."""

    block_b: int  # rows of a program
    block_n: int  # outputs of a program
    block_k: int  # of K at a time and part
    split: int  # parts of K within a program
    warps: int
    stages: int


class Weights(NamedTuple):
    """One layer."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


def suits(decoder: Decoder) -> bool:
    """Whether the kernels serve this model: rotary, gated, RMS norms, plain weights, no bias."""
    config = decoder.config
    plain = all(type(part) is nn.Linear for layer in decoder.layers for part in _linears(layer))
    return (
        decoder.norm.weight.dtype in (torch.bfloat16, torch.float32)
        and not (config.is_gpt2 or config.attention_bias or config.mlp_bias)
        and config.rope is not None
        and 16 <= config.head_dim <= 256
        and config.head_dim % 2 == 0
        and config.heads <= MOST_HEADS * config.kv_heads
        and plain
        and type(decoder.head) is nn.Linear
    )


def _linears(layer: nn.Module) -> list[nn.Module | None]:
    assert isinstance(layer, Layer)
    attention, feedforward = layer.attention, layer.feedforward
    return [
        *(attention.q, attention.k, attention.v, attention.out),
        *(feedforward.gate, feedforward.up, feedforward.down),
    ]


class CompactStep:
    """Logits, or tokens, of up to `rows` rows. `layers` are the joined weights."""

    def __init__(
        self,
        decoder: Decoder,
        layers: list[Weights],
        angles: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        rows: int,
    ) -> None:
        config = decoder.config
        self._config, self._layers, self._angles = config, layers, angles
        self._keys, self._values = keys, values
        self._embedding, self._head = decoder.embedding.weight, decoder.head.weight
        self._norm = decoder.norm.weight
        self._processors = processors(self._norm)
        self._early = may_start_early(self._norm.device)
        self._precision = "ieee" if self._norm.dtype == torch.float32 else "tf32"
        wide = config.heads * config.head_dim
        joined = wide + 2 * config.kv_heads * config.head_dim
        like = self._norm
        self._x, self._y = like.new_empty((2, rows, config.dim))
        self._qkv = like.new_empty((rows, joined))
        self._seen = like.new_empty((rows, wide))
        self._inner = like.new_empty((rows, config.hidden))
        self._logits = like.new_empty((rows, config.vocab), dtype=torch.float32)
        self._squares = like.new_empty((-(-config.dim // 8), rows), dtype=torch.float32)
        self._arrived = like.new_zeros((rows, config.kv_heads), dtype=torch.int32)
        shapes = [(config.dim, wide), (config.dim, config.hidden)]
        self._held = Held(like, shapes, rows, self._precision, early=self._early)
        tiles = -(-config.vocab // 16)
        self._best = like.new_empty((tiles, rows), dtype=torch.float32)
        self._place = like.new_empty((tiles, rows), dtype=torch.int32)

    def logits(self, rows: Rows) -> Tensor:
        """(B, V) in float32 after this step's tokens, whose keys and values are stored."""
        self._run(rows)
        return self._logits[: len(rows.ids)]

    def ranked(self, rows: Rows, count: int) -> tuple[Tensor, TopK]:
        """Logits, and the `count` likeliest of each row with their log-probabilities.

        What the first half of top-k looks for in the logits, the last product has seen.
        """
        lines, (vocabulary, inputs) = len(rows.ids), self._head.shape
        group = topk.group_of(lines, vocabulary, count, self._logits)
        block = self.cut_for("scaled", lines, vocabulary, inputs).block_n
        if group is None or block % group:
            logits = self.logits(rows)
            return logits, ranked(logits, count)
        maxima = self._logits.new_empty((lines, -(-vocabulary // group)))
        peaks, totals = self._logits.new_empty((2, lines, -(-vocabulary // block)))
        self._run(rows, {"maxima": maxima, "peaks": peaks, "totals": totals, "GROUP": group})
        logits = self._logits[:lines]
        found = topk.decided(logits, count, maxima, peaks, totals)
        return logits, TopK(found.values, found.indices, found.lse)

    def pick(self, rows: Rows, made: Tensor, tokens: Tensor, history: Tensor) -> None:
        """The likeliest token of every row; ids, positions and `made` move one step on.

        `history` (rows, room) has it at made % room. −1 stands where a row has no softmax.
        """
        tiles = self._run(rows)
        count = len(rows.ids)
        pick_kernel[(count,)](
            *(self._best, self._place, rows.active, tokens, rows.ids, rows.positions, made),
            *(history, tiles, count, history.shape[1]),
            BLOCK=triton.next_power_of_2(tiles),
            PDL=self._early,
            num_warps=4,
            **self._launch(),
        )

    def _run(self, rows: Rows, told: dict[str, Any] | None = None) -> int:
        """Everything up to the logits; into how many tiles their columns were cut.

        `told` is what the last product is told besides; without it it finds the best of its tiles.
        """
        config, count = self._config, len(rows.ids)
        embed_kernel[(count,)](
            *(rows.ids, self._embedding, self._layers[0].norms[0], self._x, self._y),
            *(self._squares, config.dim),
            BLOCK=triton.next_power_of_2(config.dim),
            PDL=self._early,
            num_warps=4,
            **self._launch(),
        )
        tiles = 1
        for number, layer in enumerate(self._layers):
            self._scaled(self._y, layer.qkv, self._qkv, count, tiles)
            self._attend(rows, layer, number)
            tiles = self._grown(self._seen, layer.out, layer.norms[1], count)
            self._gated(layer.up, count, tiles)
            last = number + 1 == len(self._layers)
            after = self._norm if last else self._layers[number + 1].norms[0]
            tiles = self._grown(self._inner, layer.down, after, count)
        head = self._y, self._head, self._logits, count, tiles
        return self._scaled(*head, best=told is None, told=told)

    def _grown(self, x: Tensor, w: Tensor, weight: Tensor, rows: int) -> int:
        """The stream and one more product."""
        if not self._held.serves(w, rows):
            return self._added(x, w, weight, rows)
        return self._held.add(x, w, self._x, weight, self._y, self._squares, rows)

    def _launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self._early else {}

    def _scaled(
        self, x: Tensor, w: Tensor, out: Tensor, rows: int, parts: int, *,
        best: bool = False, told: dict[str, Any] | None = None,
    ) -> int:  # fmt: skip
        outputs, inputs = w.shape
        cut = self.cut_for("scaled", rows, outputs, inputs)
        tiles = -(-outputs // cut.block_n)
        if self._early and out is self._qkv and is_boxed("scaled", cut, w):
            self._boxed(cut, x, w, out, rows, parts)
            return tiles
        scaled_kernel[(tiles, triton.cdiv(rows, cut.block_b))](
            *(x, w, self._squares, out),
            *((self._best, self._place) if best else (None, None)),
            *(rows, outputs, inputs, parts, x.stride(0), w.stride(0), out.stride(0)),
            self._config.norm_eps,
            PARTS=triton.next_power_of_2(parts),
            **self._cut(cut, "scaled", outputs, inputs),
            **(told or {}),
        )
        return tiles

    def _boxed(self, cut: Cut, x: Tensor, w: Tensor, out: Tensor, rows: int, parts: int) -> None:
        outputs, inputs = w.shape
        known = boxed_of(cut, outputs, inputs)
        boxed_kernel[(outputs // cut.block_n, triton.cdiv(rows, cut.block_b))](
            TensorDescriptor.from_tensor(x[:rows], [cut.block_b, cut.block_k]),
            TensorDescriptor.from_tensor(w, [cut.block_n, cut.block_k]),
            *(w, self._squares, out, rows, outputs, inputs, parts, w.stride(0), out.stride(0)),
            self._config.norm_eps,
            PARTS=triton.next_power_of_2(parts),
            **known,
            num_warps=cut.warps,
            num_stages=cut.stages,
            launch_pdl=True,
        )

    def _gated(self, w: Tensor, rows: int, parts: int) -> None:
        outputs, inputs = w.shape[0] // 2, w.shape[1]
        cut = self.cut_for("gated", rows, outputs, inputs)
        if self._early and is_boxed("gated", cut, w):
            return self._boxed_gated(cut, w, rows, parts)
        gated_kernel[(triton.cdiv(outputs, cut.block_n), triton.cdiv(rows, cut.block_b))](
            *(self._y, w, self._squares, self._inner, rows, outputs, inputs, parts),
            *(self._y.stride(0), w.stride(0), self._inner.stride(0), self._config.norm_eps),
            PARTS=triton.next_power_of_2(parts),
            **self._cut(cut, "gated", outputs, inputs),
        )
        return None

    def _boxed_gated(self, cut: Cut, w: Tensor, rows: int, parts: int) -> None:
        outputs, inputs = w.shape[0] // 2, w.shape[1]
        boxed_gated_kernel[(outputs // cut.block_n, triton.cdiv(rows, cut.block_b))](
            TensorDescriptor.from_tensor(self._y[:rows], [cut.block_b, cut.block_k]),
            TensorDescriptor.from_tensor(w, [cut.block_n, cut.block_k]),
            *(self._squares, self._inner, rows, outputs, inputs, parts, self._inner.stride(0)),
            self._config.norm_eps,
            BLOCK_B=cut.block_b,
            BLOCK_N=cut.block_n,
            BLOCK_K=cut.block_k,
            PARTS=triton.next_power_of_2(parts),
            num_warps=cut.warps,
            num_stages=cut.stages,
            launch_pdl=True,
        )

    def _added(self, x: Tensor, w: Tensor, weight: Tensor, rows: int) -> int:
        outputs, inputs = w.shape
        cut = self.cut_for("added", rows, outputs, inputs)
        tiles = -(-outputs // cut.block_n)
        added_kernel[(tiles, triton.cdiv(rows, cut.block_b))](
            *(x, w, self._x, weight, self._y, self._squares),
            *(rows, outputs, inputs, x.stride(0), w.stride(0)),
            **self._cut(cut, "added", outputs, inputs),
        )
        return tiles

    def cut_for(self, kind: str, rows: int, outputs: int, inputs: int) -> Cut:
        """How a product of so many rows is cut."""
        return cut_of(kind, rows, outputs, inputs, self._norm.element_size())

    def _cut(self, cut: Cut, kind: str, outputs: int, inputs: int) -> dict[str, object]:
        """All that a product is told besides its arguments."""
        even = outputs % cut.block_n == 0 and inputs % (cut.split * cut.block_k) == 0
        fixed = fixed_of(
            *(cut, kind),
            even=even,
            outputs=outputs,
            inputs=inputs,
            precision=self._precision,
            early=self._early,
        )
        return {**fixed, "num_warps": cut.warps, "num_stages": cut.stages, **self._launch()}

    def _attend(self, rows: Rows, layer: Weights, number: int) -> None:
        config, count = self._config, len(rows.ids)
        ratio, groups = config.heads // config.kv_heads, count // rows.beams
        block_d = triton.next_power_of_2(config.head_dim)
        tail = rows.tails.shape[1] * rows.tail_size
        cut = attend_cut(block_d, self._norm.element_size(), rows.beams, ratio, tail)
        common, splits = self._splits(rows, cut.tile)
        parts, lse = self._seen, None
        if common + splits > 1:
            shape = (common + splits, count, config.heads)
            parts = self._norm.new_empty((*shape, config.head_dim), dtype=torch.float32)
            lse = self._norm.new_empty(shape, dtype=torch.float32)
        at_once = rows.beams > 1 and common + splits <= MERGED
        programs = (groups * common + count * splits) * config.kv_heads
        attend_kernel[(programs,)](
            *(self._qkv, self._keys[number], self._values[number], rows.pages, rows.tails),
            *(rows.prefix, rows.positions, rows.active, *self._angles, layer.q_norm, layer.k_norm),
            *(parts, lse, self._seen, self._arrived, count, config.kv_heads, self._qkv.stride(0)),
            *(rows.pages.stride(0), rows.tails.stride(0)),
            *(config.head_dim**-0.5 * LOG2_E, config.norm_eps, layer.window or 0, common, splits),
            BEAMS=rows.beams,
            R=ratio,
            D=config.head_dim,
            BLOCK_D=block_d,
            BLOCK_M=max(16, triton.next_power_of_2(rows.beams * ratio)),
            BLOCK_S=cut.tile,
            P=rows.page_size,
            TAIL_P=rows.tail_size,
            WINDOWED=layer.window is not None,
            PRECISION=self._precision,
            PDL=self._early,
            PARTS=common + splits if at_once else 0,
            **self._asked(layer.out),
            num_warps=cut.warps,
            num_stages=2,
            maxnreg=cut.registers,
            **self._launch(),
        )
        if lse is not None and not at_once:
            merge_kernel[(count * config.heads,)](
                *(parts, lse, self._seen, common + splits, count * config.heads),
                D=config.head_dim,
                BLOCK_D=block_d,
                BLOCK_PARTS=triton.next_power_of_2(common + splits),
                PDL=self._early,
                num_warps=1,
                **self._launch(),
            )

    def _asked(self, w: Tensor) -> dict[str, object]:
        """What attention asks for: the next product's weights, if that asks for none itself."""
        fits = w.numel() >= AHEAD and w.nbytes <= AFTER
        whole = w.is_contiguous() and w.data_ptr() % 16 == 0  # the copy engine fetches 16 bytes
        asks = self._early and fits and whole
        return {"after": w, "after_count": w.numel()} if asks else {}

    def _splits(self, rows: Rows, tile: int) -> tuple[int, int]:
        """Of the common beginning and of the tails: what fills the chip, a tile at least."""
        heads, count = self._config.kv_heads, len(rows.ids)
        each = 256 if self._norm.element_size() == 4 else max(tile, 64)
        common = 0
        if rows.beams > 1:
            positions = rows.pages.shape[1] * rows.page_size
            common = splits_of(positions, count // rows.beams * heads, self._processors, each)
        positions = rows.tails.shape[1] * rows.tail_size
        return common, splits_of(positions, count * heads, self._processors, each)


def cut_of(kind: str, rows: int, outputs: int, inputs: int, size: int) -> Cut:
    """Small products are cut fine, so that all processors have a part; docs/components/decoder.md.

    Of larger ones a program takes 64 rows of weights at a time; where that would leave processors
    without one, 16. The next kernel's programs must find room beside those that still run, or they
    crowd on the processors that are free first: few stages where every processor has two programs.
    """
    block_b = rows_of(rows)
    if size == 4:
        return Cut(min(block_b, 16), 16, 32, 2, 4, 2)
    if block_b > 16:
        return _for_many(kind, block_b, outputs, inputs)
    lines = outputs * (2 if kind == "gated" else 1)  # rows of weights
    weights = inputs * lines
    if kind == "gated":
        if weights < 1 << 23:
            return Cut(block_b, 8, 64, 2, 2, 6)
        return Cut(block_b, 32, 64, 1, 4, 8) if lines <= 1 << 14 else Cut(block_b, 32, 128, 1, 4, 6)
    if kind == "added" or weights < 1 << 23:
        return Cut(block_b, 16, 64, 4, 4, 6)
    if weights < 1 << 24 or outputs > 20_000:
        return Cut(block_b, 64, 128, 1, 4, 6)
    return Cut(block_b, 16, 128, 4, 4, 4)


def _for_many(kind: str, block_b: int, outputs: int, inputs: int) -> Cut:
    """The batch is what a program reads most of: it takes a part of it, or more weights."""
    if outputs > 20_000:
        return Cut(block_b, 128, 64, 1, 4, 4)
    if kind == "gated":
        return Cut(block_b, 32, 64, 1, 4, 8)
    if kind == "scaled":
        return Cut(32, 64, 64, 1, 4, 6)
    return Cut(16, 64, 64, 1, 4, 8) if inputs > 2 * outputs else Cut(32, 32, 128, 1, 4, 4)


def is_boxed(kind: str, cut: Cut, w: Tensor) -> bool:
    """Whether the copy engine fetches a product behind a norm that is not the head's.

    Boxes are whole, of the cuts for many rows (of a tree too), and of a long K.
    """
    (outputs, inputs), gated = w.shape, kind == "gated"
    whole = outputs % ((1 + gated) * cut.block_n) == 0 and inputs % cut.block_k == 0
    many = {(64, 32, 64, 1)} if gated else {(32, 64, 64, 1), (128, 64, 64, 1)}
    return w.element_size() == 2 and whole and inputs >= 1024 and cut[:4] in many


def boxed_of(cut: Cut, outputs: int, inputs: int) -> dict[str, int]:
    """What `boxed_kernel` knows at compile time, apart from the number of its squares."""
    return {
        "BLOCK_B": cut.block_b,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "AHEAD": triton.next_power_of_2(inputs) if inputs * outputs < AHEAD else 64,
    }


def fixed_of(
    cut: Cut, kind: str, *, even: bool, outputs: int, inputs: int, precision: str, early: bool
) -> dict[str, object]:
    """What all products know at compile time."""
    weights = inputs * outputs * (2 if kind == "gated" else 1)
    return {
        "BLOCK_B": cut.block_b,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "SPLIT": cut.split,
        "EVEN": even,
        "AHEAD": max(64, triton.next_power_of_2(inputs)) if weights < AHEAD else 64,
        "PRECISION": precision,
        "PDL": early,
    }
