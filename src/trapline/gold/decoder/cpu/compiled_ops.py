"""Operations of a decoding step in C (`compiled_ops.c`): float32 on a CPU with a compiler."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from trapline.gold.c_library import load, run_in_threads
from trapline.gold.c_pointer import in_cpu_memory, pointer
from trapline.gold.decoder.config import AttentionRules
from trapline.gold.decoder.rope import Rope
from trapline.gold.errors import ShapeError

SOURCE = Path(__file__).with_name("compiled_ops.c")
#: Work a thread, in multiplications, below which another thread does not pay.
_PRODUCTS_A_THREAD = 1 << 17


class _Job(ctypes.Structure):
    """Mirrors the struct in the C source."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("q", "keys", "values", "table", "lengths", "out")),
        *((n, ctypes.c_long) for n in ("columns", "page", "heads", "groups", "width", "window")),
        *((n, ctypes.c_long) for n in ("items", "next")),
        *((n, ctypes.c_float) for n in ("scale", "softcap")),
    )


def suits(*given: Tensor | None) -> bool:
    """Whether all are contiguous float32 in CPU memory, without gradients, and C is available."""
    tensors = [one for one in given if one is not None]
    return (
        in_cpu_memory(*tensors)
        and all(one.dtype == torch.float32 and one.is_contiguous() for one in tensors)
        and not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))
        and unavailable() is None
    )


def unavailable() -> str | None:
    """Why the C code is not available, or None."""
    loaded = _library()
    return loaded if isinstance(loaded, str) else None


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMS norm of x + delta, x + delta), for rows (B, C)."""
    total, y = torch.empty_like(x), torch.empty_like(x)
    rows = [pointer(one, torch.float32, x.shape) for one in (x, delta, total, y)]
    scale = pointer(weight, torch.float32, x.shape[1:])
    _loaded().add_norm(*rows[:2], scale, *rows[2:], *x.shape, eps)
    return y, total


def rope_and_append(
    qkv: Tensor, rope: Rope, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """As `step_ops.rope_and_append`; positions and slots have any integer dtype."""
    positions, slots = (one.long().contiguous() for one in (positions, slots))
    (_, groups, width), rows = keys.shape, len(qkv)
    heads = qkv.shape[1] // width - 2 * groups
    q = qkv.new_empty((rows, heads, width))
    cosine, sine, q_norm, k_norm, eps = rope
    context = 0 if cosine is None else len(cosine)
    single = torch.float32
    _loaded().rope_and_append(
        pointer(qkv, single, (rows, (heads + 2 * groups) * width)),
        *(
            one if one is None else pointer(one, single, (context, width // 2))
            for one in (cosine, sine)
        ),
        *(one if one is None else pointer(one, single, (width,)) for one in (q_norm, k_norm)),
        *(pointer(one, torch.int64, (rows,)) for one in (positions, slots)),
        pointer(q, single, (rows, heads, width)),
        *(pointer(one, single, keys.shape) for one in (keys, values)),
        *(rows, heads, groups, width, eps),
    )
    return q


def attend(
    q: Tensor,
    stored: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
    page_size: int,
    rules: AttentionRules,
) -> Tensor:
    """As `step_ops.decode_attention` without shared prefixes."""
    (rows, heads, width), groups = q.shape, stored[0].shape[1]
    out = torch.empty_like(q)
    if not rows:
        return out
    table, lengths = table.int().contiguous(), lengths.int().contiguous()
    items, longest = rows * groups, int(lengths.max())
    if longest > table.shape[1] * page_size:
        raise ShapeError(f"{longest} positions do not fit {table.shape[1]} pages of {page_size}")
    job = _Job(
        pointer(q, torch.float32, (rows, heads, width)),
        *(pointer(one, torch.float32, (len(stored[0]), groups, width)) for one in stored),
        pointer(table, torch.int32, (rows, table.shape[1])),
        pointer(lengths, torch.int32, (rows,)),
        pointer(out, torch.float32, (rows, heads, width)),
        *(table.shape[1], page_size, heads, groups, width, rules.window or 0, items, 0),
        *(rules.scale, rules.softcap),
    )
    work = rows * heads * longest * width // _PRODUCTS_A_THREAD
    run_in_threads(_loaded().attend, job, min(torch.get_num_threads(), work, items))
    return out


def _loaded() -> ctypes.CDLL:
    library = _library()
    assert not isinstance(library, str), library
    return library


@cache
def _library() -> ctypes.CDLL | str:
    address, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_double
    return load(
        SOURCE,
        add_norm=[address] * 5 + [number] * 2 + [real],
        rope_and_append=[address] * 10 + [number] * 4 + [real],
        attend=[address],
    )
