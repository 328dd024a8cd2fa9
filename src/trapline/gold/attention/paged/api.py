"""Attention over a paged cache, and appending to it: what is accepted, and who computes it.

Pages are (pages, G, P, D) with any strides, in q's dtype, or they hold codes with one float16 scale
a position and head, value = code · scale: int8, float8_e4m3fn, or two 4-bit codes in a uint8
(element d below, element d + D/2 above).
"""

from typing import Any

import numpy as np

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.attention.paged import oracle as oracle_paged
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.impl import Impl, choose
from trapline.gold.kv_cache.codecs import unpack_nibbles

_OFFERED: tuple[Impl, ...] = ("oracle", "torch", "kernels")
_CODES = ("int8", "uint8", "float8_e4m3fn")


def paged_attention(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    cu_q: Any = None,
    max_q: int = 1,
    k_scale: Any = None,
    v_scale: Any = None,
    tree_mask: Any = None,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    out: Any = None,
    prefix_rows: int = 0,
    prefix_pages: Any = None,
    check: bool = False,
    impl: Impl | None = None,
) -> Any:
    """Attention of the last queries of each sequence to everything before them: (queries, H, D).

    Sequence b is the seq_lens[b] positions (new ones included) on the pages block_table[b], in
    order. Its queries are the rows cu_q[b] … cu_q[b+1] of q, at most max_q; without cu_q every
    sequence has max_q of them. They stand at its end, and see themselves and what came before;
    `tree_mask` (queries, max_q) says instead which of the new positions each sees; kernels read it
    without a copy where its rows begin at multiples of 8 bytes. What lies on a page beyond the
    length is never looked at. A sequence of length 0 gives 0.

    A prefix that sequences share can be read once for all of them: of every `prefix_rows` sequences
    in a row, number i of such groups, the first `prefix_pages[i]` pages are the same, full, and
    before any query. That is a hint: it changes who reads what, and no answer.

    `check=True` verifies lengths, boundaries, the table and the hint, which on a GPU means waiting
    for it.
    """
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    arrays |= {"block_table": block_table, "seq_lens": seq_lens}
    optional = {"cu_q": cu_q, "k_scale": k_scale, "v_scale": v_scale, "tree_mask": tree_mask}
    optional |= {"prefix_pages": prefix_pages}
    arrays |= {name: value for name, value in optional.items() if value is not None}
    everything = arrays if out is None else {**arrays, "out": out}
    chosen = choose("paged_attention", _OFFERED, impl, **everything)
    checks.one_device(**everything)
    _check(arrays, max_q, window, softcap, scale, out)
    _check_prefix(arrays, prefix_rows)
    if check:
        _check_values(arrays, max_q, prefix_rows)
    scale = float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
    if chosen == "oracle":
        found = _by_oracle(arrays, max_q, window, softcap, scale)
        return found if out is None else _copied(found, out)
    from trapline.gold.attention.paged import reference as fast_paged

    return fast_paged.paged_attention(
        *(q, k_pages, v_pages, block_table, seq_lens, cu_q, max_q, k_scale, v_scale, tree_mask),
        *(window or 0, float(softcap), scale, prefix_rows, prefix_pages, out),
        _operators(chosen),
    )


def paged_append(
    k: Any,
    v: Any,
    k_pages: Any,
    v_pages: Any,
    slots: Any,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    cosine: Any = None,
    sine: Any = None,
    check: bool = False,
    impl: Impl | None = None,
) -> None:
    """Writes k and v (tokens, G, D) to their slots, quantised where the pages hold codes.

    Slot p · P + i is position i of page p; slot −1 skips a token. Scales are rounded up to float16,
    so that the largest element of a row never clips. With `cosine` and `sine`, (tokens, D/2) each,
    the keys are turned first (RoPE: elements d and d + D/2 are a pair). `check=True` verifies the
    slots, which on a GPU means waiting for it.
    """
    arrays = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "slots": slots}
    optional = {"k_scale": k_scale, "v_scale": v_scale, "cosine": cosine, "sine": sine}
    arrays |= {name: value for name, value in optional.items() if value is not None}
    chosen = choose("paged_append", ("torch", "kernels"), impl, **arrays)
    checks.one_device(**arrays)
    width = _width(arrays)
    sizes = checks.axes(
        k=(k, "N G D"), v=(v, "N G D"), k_pages=(k_pages, "M G P C"), v_pages=(v_pages, "M G P C")
    )
    if sizes["D"] != width:
        raise ShapeError(f"the pages hold rows of {width} elements, but k has {sizes['D']}")
    checks.axes(k=(k, "N G D"), slots=(slots, "N"))
    _check_dtype("slots", slots, "int64")
    checks.floating(*checks.LOW_FLOATS, k=k, v=v)
    _check_scales(arrays)
    _check_turn(arrays, sizes["D"])
    if check:
        _check_slots(slots, sizes["M"] * sizes["P"])
    from trapline.gold.attention.paged import reference as fast_paged

    fast_paged.paged_append(
        *(k, v, k_pages, v_pages, slots, k_scale, v_scale, cosine, sine), _operators(chosen)
    )


def _operators(chosen: Impl) -> str:
    """The namespace of the operators that do the work; importing it registers them."""
    if chosen == "kernels":
        from trapline.gold.attention.paged.triton.attention import KERNELS

        return str(KERNELS)
    from trapline.gold.attention.paged.reference import TORCH

    return TORCH


def _width(arrays: dict[str, Any]) -> int:
    """D of the pages: a byte of 4-bit codes holds two elements."""
    columns = int(arrays["k_pages"].shape[-1])
    return 2 * columns if checks.dtype_name(arrays["k_pages"]) == "uint8" else columns


def _check(
    arrays: dict[str, Any],
    max_q: int,
    window: int | None,
    softcap: float,
    scale: float | None,
    out: Any,
) -> None:
    q, k_pages, v_pages = (arrays[name] for name in ("q", "k_pages", "v_pages"))
    checks.floating(*checks.LOW_FLOATS, q=q)
    sizes = checks.axes(
        q=(q, "Q H D"),
        k_pages=(k_pages, "M G P C"),
        v_pages=(v_pages, "M G P C"),
        block_table=(arrays["block_table"], "B W"),
        seq_lens=(arrays["seq_lens"], "B"),
    )
    if sizes["D"] != _width(arrays):
        raise ShapeError(
            f"the pages hold rows of {_width(arrays)} elements, but q has {sizes['D']}"
        )
    if sizes["G"] == 0 or sizes["H"] % sizes["G"]:
        raise ShapeError(
            f"{sizes['H']} query heads are no multiple of {sizes['G']} key/value heads"
        )
    for name in ("block_table", "seq_lens", "cu_q"):
        if name in arrays:
            _check_dtype(name, arrays[name], "int32")
    _check_scales(arrays)
    _check_queries(arrays, sizes, max_q)
    _check_rules(arrays, window, softcap, scale)
    if out is not None and (tuple(out.shape) != tuple(q.shape) or out.dtype != q.dtype):
        raise ShapeError(f"out must be like q, {tuple(q.shape)} of {q.dtype}")


def _check_queries(arrays: dict[str, Any], sizes: dict[str, int], max_q: int) -> None:
    checks.integer_between(1, 2**31 - 1, max_q=max_q)
    batch, queries = sizes["B"], sizes["Q"]
    if "cu_q" not in arrays and queries != batch * max_q:
        raise ShapeError(f"{batch} sequences of {max_q} queries are not {queries} queries")
    if "cu_q" in arrays and tuple(arrays["cu_q"].shape) != (batch + 1,):
        raise ShapeError(f"cu_q must have {batch + 1} entries, got {tuple(arrays['cu_q'].shape)}")
    if "tree_mask" in arrays:
        mask = arrays["tree_mask"]
        _check_dtype("tree_mask", mask, "bool")
        if tuple(mask.shape) != (queries, max_q):
            raise ShapeError(f"tree_mask must be ({queries}, {max_q}), got {tuple(mask.shape)}")


def _check_rules(
    arrays: dict[str, Any], window: int | None, softcap: float, scale: float | None
) -> None:
    if window is not None:
        checks.integer_between(1, 2**31 - 1, window=window)
        if "tree_mask" in arrays:
            raise RangeError("a tree mask says who sees whom: it takes no window")
    if not 0.0 <= softcap < float("inf"):
        raise RangeError(f"softcap must be 0 (none) or positive, got {softcap}")
    if scale is not None:
        checks.positive(scale=scale)


def _check_prefix(arrays: dict[str, Any], prefix_rows: int) -> None:
    checks.integer_between(0, 2**31 - 1, prefix_rows=prefix_rows)
    if ("prefix_pages" in arrays) != (prefix_rows > 0):
        raise RangeError("a shared prefix needs both prefix_rows, 1 or more, and prefix_pages")
    if prefix_rows:
        _check_dtype("prefix_pages", arrays["prefix_pages"], "int32")
        batch, shape = len(arrays["seq_lens"]), tuple(arrays["prefix_pages"].shape)
        if batch % prefix_rows or shape != (batch // prefix_rows,):
            raise ShapeError(
                f"{batch} sequences in groups of {prefix_rows} do not fit prefix_pages {shape}"
            )


def _check_slots(slots: Any, count: int) -> None:
    for token, slot in enumerate(slots.tolist()):
        if not -1 <= slot < count:
            raise RangeError(f"token {token} goes to slot {slot}; there are {count}, and -1 skips")


def _check_turn(arrays: dict[str, Any], width: int) -> None:
    given = [arrays[name] for name in ("cosine", "sine") if name in arrays]
    if len(given) == 1:
        raise ShapeError("keys are turned by both cosine and sine, got one of them")
    wanted = (len(arrays["k"]), width // 2)
    for angles in given:
        if width % 2 or tuple(angles.shape) != wanted:
            raise ShapeError(
                f"cosine and sine of keys of {width} elements must be {wanted}, "
                f"got {tuple(angles.shape)}"
            )


def _check_scales(arrays: dict[str, Any]) -> None:
    kinds = {checks.dtype_name(arrays[name]) for name in ("k_pages", "v_pages")}
    if len(kinds) > 1:
        raise DTypeError(
            f"both kinds of pages must have one dtype, got {' and '.join(sorted(kinds))}"
        )
    (kind,) = kinds
    given = [name for name in ("k_scale", "v_scale") if name in arrays]
    if kind in _CODES and len(given) < 2:
        raise DTypeError(f"pages of {kind} need k_scale and v_scale")
    if kind not in _CODES:
        rows = arrays["q"] if "q" in arrays else arrays["k"]
        if given:
            raise DTypeError(f"pages of {kind} take no scale")
        checks.floating(*checks.LOW_FLOATS, rows=rows, pages=arrays["k_pages"])
    for name in given:
        _check_dtype(name, arrays[name], "float16")
        checks.axes(k_pages=(arrays["k_pages"], "M G P C"), **{name: (arrays[name], "M G P")})


def _check_dtype(name: str, array: Any, wanted: str) -> None:
    if checks.dtype_name(array) != wanted:
        raise DTypeError(f"{name} must be {wanted}, got {checks.dtype_name(array)}")


def _check_values(arrays: dict[str, Any], max_q: int, prefix_rows: int) -> None:
    """What only the numbers tell."""
    table, lengths = (arrays[name].tolist() for name in ("block_table", "seq_lens"))
    pages, _, size, _ = arrays["k_pages"].shape
    queries = len(arrays["q"])
    ends = arrays["cu_q"].tolist() if "cu_q" in arrays else range(0, queries + 1, max_q)
    if list(ends) != sorted(ends) or ends[0] != 0 or ends[-1] != queries:
        raise RangeError(f"cu_q must rise from 0 to {queries}, got {list(ends)}")
    for b, (row, length) in enumerate(zip(table, lengths, strict=True)):
        if not 0 <= length <= len(row) * size:
            raise ShapeError(
                f"sequence {b} has length {length}, but its table holds {len(row) * size} positions"
            )
        new = ends[b + 1] - ends[b]
        if new > min(max_q, length) and length:
            raise RangeError(f"sequence {b} has {new} queries; it may have {min(max_q, length)}")
        used = row[: cdiv(length, size)]
        if used and not (min(used) >= 0 and max(used) < pages):
            raise RangeError(f"sequence {b} lies on pages {used}, but there are {pages}")
        if prefix_rows:
            shared, leader = int(arrays["prefix_pages"][b // prefix_rows]), b // prefix_rows
            same = row[:shared] == table[leader * prefix_rows][:shared]
            if not 0 <= shared * size <= length - new or not same:
                raise RangeError(f"sequence {b} does not begin with its group's {shared} pages")


def _by_oracle(
    arrays: dict[str, Any], max_q: int, window: int | None, softcap: float, scale: float
) -> np.ndarray:
    q = arrays["q"]
    starts = arrays.get("cu_q", np.arange(0, len(q) + 1, max_q))
    values = [
        _decoded(arrays[f"{name}_pages"], arrays.get(f"{name}_scale"), q.shape[-1])
        for name in ("k", "v")
    ]
    found = oracle_paged.paged_attention(
        *(q, *values, arrays["block_table"], arrays["seq_lens"], starts),
        tree_mask=arrays.get("tree_mask"),
        window=window,
        softcap=softcap,
        scale=scale,
    )
    return found.astype(q.dtype)


def _decoded(pages: np.ndarray, scales: np.ndarray | None, width: int) -> np.ndarray:
    if scales is None:
        return pages
    codes = unpack_nibbles(pages, width) if pages.dtype == np.uint8 else pages
    return np.asarray(codes.astype(np.float64) * scales[..., None].astype(np.float64))


def _copied(found: np.ndarray, out: np.ndarray) -> np.ndarray:
    out[...] = found
    return out
