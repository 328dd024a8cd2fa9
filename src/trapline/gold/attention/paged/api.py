"""Attention over a paged cache, and appending to it: the public functions and their checks.

Pages are (pages, G, P, D) with any strides, or in another `layout` (`trapline.gold.page_layout`).
They have q's dtype, or hold codes with one float16 scale per position and head, value = code ·
scale: int8, float8_e4m3fn, or two 4-bit codes in a uint8 (element d in the low half, element
d + D/2 in the high half).
"""

from typing import Any

import numpy as np

from trapline.gold import checks
from trapline.gold.arithmetic import cdiv
from trapline.gold.attention import oracle
from trapline.gold.attention.api import check_heads, checked_rules, readable
from trapline.gold.attention.paged import PagedProblem
from trapline.gold.errors import DTypeError, RangeError, ShapeError
from trapline.gold.impl import Impl, choose
from trapline.gold.kv_cache.codecs import unpack_nibbles
from trapline.gold.page_layout import PageLayout, as_pages, check_layout
from trapline.gold.replay import replayed

_OFFERED: tuple[Impl, ...] = ("oracle", "torch", "kernels")
_APPENDED_BY: tuple[Impl, ...] = ("torch", "kernels")
_CODES = ("int8", "uint8", "float8_e4m3fn")


@replayed
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
    check: bool | None = None,
    layout: PageLayout = "bhsd",
    impl: Impl | None = None,
) -> Any:
    """Attention of each sequence's last queries to all positions up to theirs: (queries, H, D).

    Sequence b is the seq_lens[b] positions (new ones included) on the pages block_table[b], in
    order. Its queries are the rows cu_q[b] … cu_q[b+1] of q, at most max_q; without cu_q every
    sequence has max_q. They are its last positions and see themselves and all positions before
    them; `tree_mask` (queries, max_q) names instead which of the new positions each one sees (the
    kernels read it without a copy if its rows begin at multiples of 8 bytes). Positions on a page
    beyond the length are never read. A sequence of length 0 gives 0.

    A prefix that sequences share can be read once for all of them: in group i of `prefix_rows`
    consecutive sequences, the first `prefix_pages[i]` pages are the same, full, and before any
    query. This hint changes the speed, not the result. `layout` is the order in which pages and
    scales are given.

    `check=True` verifies lengths, boundaries, the table and the hint; `check=False` does not. By
    default they are verified for NumPy arrays and CPU tensors, but not for CUDA tensors, where
    reading them waits for the device and cannot be captured in a graph, nor under `torch.compile`.
    """
    pages = _pages(layout, k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale)
    k_pages, v_pages, k_scale, v_scale = pages
    arrays = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    arrays |= {"block_table": block_table, "seq_lens": seq_lens}
    optional = {"cu_q": cu_q, "k_scale": k_scale, "v_scale": v_scale, "tree_mask": tree_mask}
    optional |= {"prefix_pages": prefix_pages}
    arrays |= {name: value for name, value in optional.items() if value is not None}
    everything = arrays if out is None else {**arrays, "out": out}
    chosen = choose("paged_attention", _OFFERED, impl, **everything)
    checks.one_device(**everything)
    _check(arrays, max_q, out)
    softcap, scale = checked_rules(q, window, softcap, scale)
    if window is not None and tree_mask is not None:
        raise RangeError("tree_mask and window exclude each other: give one of them")
    _check_prefix(arrays, prefix_rows)
    if check or (check is None and readable(seq_lens)):
        _check_values(arrays, max_q, prefix_rows)
    if chosen == "oracle":
        found = _by_oracle(arrays, max_q, window, softcap, scale)
        if out is None:
            return found
        out[...] = found
        return out
    result = q.new_empty(q.shape) if out is None else out
    problem = PagedProblem(
        *(q, k_pages, v_pages, block_table, seq_lens, cu_q, max_q, k_scale, v_scale, tree_mask),
        *(window or 0, softcap, scale, prefix_rows, prefix_pages, result),
    )
    if chosen == "kernels":
        from trapline.gold.attention.paged.triton.attention import attention_operator
    else:
        from trapline.gold.attention.paged.reference import attention_operator
    attention_operator(*problem)
    return result


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
    check: bool | None = None,
    layout: PageLayout = "bhsd",
    impl: Impl | None = None,
) -> None:
    """Write k and v (tokens, G, D) to their slots, quantised if the pages hold codes.

    Slot p · P + i is position i of page p; slot −1 skips a token. Scales are rounded up to float16,
    so that the largest element of a row never clips. With `cosine` and `sine`, (tokens, D/2) each,
    RoPE is applied to the keys first (elements d and d + D/2 are a pair).

    `check=True` verifies the slots; `check=False` does not. By default they are verified for CPU
    tensors, but not for CUDA tensors, where reading them waits for the device and cannot be
    captured in a graph, nor under `torch.compile`. Slots must be valid: a kernel writes where they
    point to.
    """
    pages = _pages(layout, k_pages=k_pages, v_pages=v_pages, k_scale=k_scale, v_scale=v_scale)
    k_pages, v_pages, k_scale, v_scale = pages
    arrays = {"k": k, "v": v, "k_pages": k_pages, "v_pages": v_pages, "slots": slots}
    optional = {"k_scale": k_scale, "v_scale": v_scale, "cosine": cosine, "sine": sine}
    arrays |= {name: value for name, value in optional.items() if value is not None}
    chosen = choose("paged_append", _APPENDED_BY, impl, **arrays)
    checks.one_device(**arrays)
    width = _width(arrays)
    sizes = checks.axes(
        k=(k, "N G D"), v=(v, "N G D"), k_pages=(k_pages, "M G P C"), v_pages=(v_pages, "M G P C")
    )
    if sizes["D"] != width:
        raise ShapeError(f"pages hold rows of {width} elements, but k has rows of {sizes['D']}")
    checks.axes(k=(k, "N G D"), slots=(slots, "N"))
    _check_dtype("slots", slots, "int64")
    checks.floating(*checks.LOW_FLOATS, k=k, v=v)
    _check_scales(arrays)
    _check_rope(arrays, sizes["D"])
    if check or (check is None and readable(slots)):
        _check_slots(slots, sizes["M"] * sizes["P"])
    if chosen == "kernels":
        from trapline.gold.attention.paged.triton.pages import append_operator
    else:
        from trapline.gold.attention.paged.reference import append_operator
    append_operator(k, v, k_pages, v_pages, slots, k_scale, v_scale, cosine, sine)


def _pages(layout: PageLayout, **given: Any) -> list[Any]:
    """Pages and scales as (pages, G, P, …); anything but an array is refused later."""
    check_layout(layout)
    if layout == "bhsd":
        return list(given.values())
    for name, array in given.items():
        shape, axes = tuple(getattr(array, "shape", ())), 3 if name.endswith("_scale") else 4
        if array is not None and len(shape) != axes:
            raise ShapeError(f"{name} must have {axes} axes in layout {layout}, got {shape}")
    return [None if array is None else as_pages(array, layout) for array in given.values()]


def _width(arrays: dict[str, Any]) -> int:
    """Elements of a row on the pages: a byte of 4-bit codes holds two."""
    columns = int(arrays["k_pages"].shape[-1])
    return 2 * columns if checks.dtype_name(arrays["k_pages"]) == "uint8" else columns


def _check(arrays: dict[str, Any], max_q: int, out: Any) -> None:
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
            f"pages hold rows of {_width(arrays)} elements, but q has rows of {sizes['D']}"
        )
    check_heads(sizes["H"], sizes["G"], empty=False)
    for name in ("block_table", "seq_lens", "cu_q"):
        if name in arrays:
            _check_dtype(name, arrays[name], "int32")
    _check_scales(arrays)
    _check_queries(arrays, sizes, max_q)
    if out is not None and (tuple(out.shape) != tuple(q.shape) or out.dtype != q.dtype):
        raise ShapeError(f"out must be like q, {tuple(q.shape)} of {q.dtype}")


def _check_queries(arrays: dict[str, Any], sizes: dict[str, int], max_q: int) -> None:
    checks.integer_between(1, 2**31 - 1, max_q=max_q)
    batch, queries = sizes["B"], sizes["Q"]
    if "cu_q" not in arrays and queries != batch * max_q:
        raise ShapeError(
            f"q must have {batch * max_q} rows, {batch} sequences of {max_q} queries, got {queries}"
        )
    if "cu_q" in arrays and tuple(arrays["cu_q"].shape) != (batch + 1,):
        raise ShapeError(f"cu_q must have {batch + 1} entries, got {tuple(arrays['cu_q'].shape)}")
    if "tree_mask" in arrays:
        mask = arrays["tree_mask"]
        _check_dtype("tree_mask", mask, "bool")
        if tuple(mask.shape) != (queries, max_q):
            raise ShapeError(f"tree_mask must be ({queries}, {max_q}), got {tuple(mask.shape)}")


def _check_prefix(arrays: dict[str, Any], prefix_rows: int) -> None:
    checks.integer_between(0, 2**31 - 1, prefix_rows=prefix_rows)
    if ("prefix_pages" in arrays) != (prefix_rows > 0):
        raise RangeError("a shared prefix needs both prefix_rows (1 or more) and prefix_pages")
    if prefix_rows:
        _check_dtype("prefix_pages", arrays["prefix_pages"], "int32")
        batch, shape = len(arrays["seq_lens"]), tuple(arrays["prefix_pages"].shape)
        if batch % prefix_rows or shape != (batch // prefix_rows,):
            raise ShapeError(
                f"prefix_pages must have one entry per group of {prefix_rows} of the {batch} "
                f"sequences, got shape {shape}"
            )


def _check_slots(slots: Any, count: int) -> None:
    for token, slot in enumerate(slots.tolist()):
        if not -1 <= slot < count:
            raise RangeError(
                f"slots must be between -1 (skip) and {count - 1}, got slot {slot} of token {token}"
            )


def _check_rope(arrays: dict[str, Any], width: int) -> None:
    given = [arrays[name] for name in ("cosine", "sine") if name in arrays]
    if len(given) == 1:
        raise ShapeError("RoPE needs both cosine and sine, got one of them")
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
            f"k_pages and v_pages must have one dtype, got {' and '.join(sorted(kinds))}"
        )
    (kind,) = kinds
    given = [name for name in ("k_scale", "v_scale") if name in arrays]
    if kind in _CODES and len(given) < 2:
        raise DTypeError(f"pages of {kind} need k_scale and v_scale")
    if kind not in _CODES:
        rows = arrays["q"] if "q" in arrays else arrays["k"]
        if given:
            raise DTypeError(f"pages of {kind} do not take k_scale and v_scale")
        checks.floating(*checks.LOW_FLOATS, rows=rows, pages=arrays["k_pages"])
    for name in given:
        _check_dtype(name, arrays[name], "float16")
        checks.axes(k_pages=(arrays["k_pages"], "M G P C"), **{name: (arrays[name], "M G P")})


def _check_dtype(name: str, array: Any, wanted: str) -> None:
    if checks.dtype_name(array) != wanted:
        raise DTypeError(f"{name} must be {wanted}, got {checks.dtype_name(array)}")


def _check_values(arrays: dict[str, Any], max_q: int, prefix_rows: int) -> None:
    """Checks that read values: boundaries, lengths, the table, the hint."""
    table, lengths = (arrays[name].tolist() for name in ("block_table", "seq_lens"))
    pages, _, size, _ = arrays["k_pages"].shape
    queries = len(arrays["q"])
    ends = arrays["cu_q"].tolist() if "cu_q" in arrays else range(0, queries + 1, max_q)
    if list(ends) != sorted(ends) or ends[0] != 0 or ends[-1] != queries:
        raise RangeError(f"cu_q must rise from 0 to {queries}, got {list(ends)}")
    for b, (row, length) in enumerate(zip(table, lengths, strict=True)):
        if not 0 <= length <= len(row) * size:
            raise ShapeError(
                f"seq_lens[{b}] must be between 0 and {len(row) * size}, the positions of its "
                f"table row, got {length}"
            )
        new = ends[b + 1] - ends[b]
        if new > min(max_q, length) and length:
            raise RangeError(
                f"sequence {b} must have at most {min(max_q, length)} queries, got {new}"
            )
        used = row[: cdiv(length, size)]
        if used and not (min(used) >= 0 and max(used) < pages):
            raise RangeError(f"block_table[{b}] must be between 0 and {pages - 1}, got {used}")
        if prefix_rows:
            shared, leader = int(arrays["prefix_pages"][b // prefix_rows]), b // prefix_rows
            same = row[:shared] == table[leader * prefix_rows][:shared]
            if not 0 <= shared * size <= length - new or not same:
                raise RangeError(
                    f"sequence {b} does not begin with the {shared} pages of its group"
                )


def _by_oracle(
    arrays: dict[str, Any], max_q: int, window: int | None, softcap: float, scale: float
) -> np.ndarray:
    q = arrays["q"]
    starts = arrays.get("cu_q", np.arange(0, len(q) + 1, max_q))
    values = [
        _decoded(arrays[f"{name}_pages"], arrays.get(f"{name}_scale"), q.shape[-1])
        for name in ("k", "v")
    ]
    found = oracle.paged_attention(
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
