"""One program an output element's row and 16 outputs, without matrix products."""

import triton
import triton.language as tl


@triton.jit
def _outputs(packed, scales, x, out, K, N, packed_o, scales_o, x_m, COLUMNS: tl.constexpr):
    tiles = tl.cdiv(N, COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < N
    total = tl.zeros([COLUMNS], tl.float32)
    bytes_of = tl.arange(0, 32)
    for group in range(tl.cdiv(K, 128)):
        at = group * 32 + bytes_of
        inside = there[:, None] & (at * 4 < K)[None, :]
        code = tl.load(packed + columns[:, None] * packed_o + at[None, :], mask=inside, other=0)
        code = code.to(tl.int32)
        part = tl.zeros([COLUMNS], tl.float32)
        for digit in tl.static_range(4):
            place = at * 4 + digit
            value = tl.load(x + row * x_m + place, mask=place < K, other=0.0).to(tl.float32)
            weight = ((code >> (2 * digit)) & 3) - 1
            part += tl.sum(weight.to(tl.float32) * value[None, :], 1)
        scale = tl.load(scales + columns * scales_o + group, mask=there, other=0.0)
        total += part * scale.to(tl.float32)
    tl.store(out + row * N + columns, total, mask=there)


def ternary_matmul(packed, scales, x, out):
    M, K = x.shape
    N = packed.shape[0]
    if M * N:
        _outputs[(M * triton.cdiv(N, 16),)](
            packed, scales, x, out, K, N, packed.stride(0), scales.stride(0), x.stride(0),
            COLUMNS=16,
        )  # fmt: skip
