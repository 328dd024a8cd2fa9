"""Attention for Hugging Face models: `attn_implementation="trapline"`.

    from trapline.gold.attention.huggingface import register

    register()
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="trapline")

Causal and full attention, sliding windows, soft caps, grouped heads, caches, training; padding at
either end of a sequence, and packed sequences given by `cu_seq_lens_q` and related arguments, go
through `flash_attention_varlen`. Dropout, attention weights, sinks, biases and other masks are
rejected: nothing is computed with another mask than the model asked for.

transformers calls `token_mask` once per forward pass and `attention` in every layer, with that
mask. A mask is

    None              every key that causality and the window allow is a token
    bool (B, W)       which of the first W keys are tokens; keys after them are not filled yet
    (0, W)            the first W keys, all of them tokens
    (0,)              some other pattern: rejected unless the layer gives sequence boundaries
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from trapline.gold.attention.api import flash_attention, flash_attention_varlen
from trapline.gold.attention.dropin import autocast
from trapline.gold.errors import ShapeError, UnsupportedError

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
except ImportError as error:
    raise ImportError("this adapter needs the package `transformers`") from error
try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # the first releases of transformers 5 pass it to every layer
    _collector = None

#: Arguments of a layer that are not supported, and their meaning.
_REFUSED = {
    "output_attentions": "attention weights (output_attentions)",
    "s_aux": "attention sinks (s_aux)",
    "position_bias": "a bias on the scores (position_bias)",
    "head_mask": "a mask of heads (head_mask)",
    "cache": "transformers' paged cache (continuous batching)",
}


def register(name: str = "trapline") -> None:
    """Make `attn_implementation=name` known to transformers. May be called again."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, token_mask)


# --- in every layer -----------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """(B,T,H,D) of query (B,H,T,D) and key, value (B,G,S,D), as layers call it."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _refuse(dropout, sliding_window is not None and not causal, more)
    rules: dict[str, Any] = {"causal": causal, "window": sliding_window, "scale": scaling}
    rules["softcap"] = softcap or 0.0
    query, key, value = autocast(query, key, value)
    if more.get("cu_seq_lens_q") is not None:
        return _packed(query, key, value, more, rules), None
    if attention_mask is None:
        return flash_attention(query, key, value, **rules).transpose(1, 2), None
    if attention_mask.ndim != 2:
        raise UnsupportedError(_other_pattern(attention_mask))
    tokens, filled = attention_mask.shape
    key, value = key[:, :, :filled], value[:, :, :filled]
    if tokens == 0:
        return flash_attention(query, key, value, **rules).transpose(1, 2), None
    return _padded(query, key, value, attention_mask, rules), None


def _refuse(dropout: float, window_on_both_sides: bool, more: dict[str, Any]) -> None:
    given = {name for name, value in more.items() if value is not None and value is not False}
    if _weights_collected():
        given.add("output_attentions")
    asked = [what for name, what in _REFUSED.items() if name in given]
    if dropout:
        asked.append(f"dropout of {dropout} (set attention_dropout to 0)")
    if window_on_both_sides:
        asked.append("a sliding window without causality")
    if asked:
        raise UnsupportedError(
            f"attn_implementation='trapline' does not support {', '.join(asked)}"
        )


def _weights_collected() -> bool:
    """Whether hooks collect attention weights: GPT-2 does not pass that to its layers."""
    if _collector is None:
        return False
    if not torch.compiler.is_compiling():
        return _are_weights(_collector.get())
    # Compiled code can only read a collector that compiled code has set. An earlier one is looked
    # up once at compile time and, if found, in every call.
    return _are_weights(_collector.global_var) or (_collected_first() and _collected_now())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _collected_first() -> bool:
    return _are_weights(_collector.context_var.get())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _collected_now() -> bool:
    return _are_weights(_collector.context_var.get())


def _are_weights(wanted: Any) -> bool:
    return any(name.endswith("attentions") for name in wanted or ())


def _other_pattern(mask: Tensor) -> str:
    shape = f"a mask of shape {tuple(mask.shape)}" if mask.ndim > 1 else "this mask"
    return (
        f"attn_implementation='trapline' does not support {shape}: it has causal and full "
        "attention, sliding windows and padding at the ends of sequences; packed sequences need "
        "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, as given by "
        "DataCollatorWithFlattening(return_flash_attn_kwargs=True)"
    )


def _packed(
    query: Tensor, key: Tensor, value: Tensor, more: dict[str, Any], rules: dict[str, Any]
) -> Tensor:
    """Sequences one after the other in a batch of one."""
    if query.shape[0] != 1:
        raise ShapeError(f"packed sequences are a batch of one, got {query.shape[0]}")
    ends = [more[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    longest = [int(more[name]) for name in ("max_length_q", "max_length_k")]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: Tensor = flash_attention_varlen(q, k, v, *ends, *longest, **rules)
    return out[None]


class _Packing(NamedTuple):
    """Order of a padded batch's B·T queries and B·W keys: tokens first, then padding.

    Padding lies outside all sequences, which gives 0. So shapes do not depend on the mask: nothing
    waits for the device, and the whole can be compiled.
    """

    queries: Tensor
    keys: Tensor
    cu_q: Tensor
    cu_k: Tensor


#: All layers of a forward pass get the same mask.
_PACKINGS: Any = WeakTensorKeyDictionary()


def _padded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rules: dict[str, Any]
) -> Tensor:
    """Compute tokens only; rows of padding are 0."""
    B, H, T, D = query.shape
    packing = _known_packing(mask, T, rules["causal"])
    q = query.transpose(1, 2).reshape(B * T, H, D).index_select(0, packing.queries)
    k, v = (
        x.transpose(1, 2).reshape(-1, x.shape[1], D).index_select(0, packing.keys)
        for x in (key, value)
    )
    ends = packing.cu_q, packing.cu_k, T, mask.shape[1]
    tokens = flash_attention_varlen(q, k, v, *ends, **rules)
    out = query.new_zeros(B * T, H, D).index_copy(0, packing.queries, tokens)
    return out.view(B, T, H, D)


def _known_packing(mask: Tensor, T: int, causal: bool) -> _Packing:
    if torch.compiler.is_compiling():  # the compiler finds what layers have in common
        return _packing(mask, T, causal)
    known = _PACKINGS.setdefault(mask, {})
    if (T, causal) not in known:
        known[T, causal] = _packing(mask, T, causal)
    packing: _Packing = known[T, causal]
    return packing


def _packing(mask: Tensor, T: int, causal: bool) -> _Packing:
    # With a causal mask the queries are the last T positions, padded like their keys; otherwise the
    # mask applies to keys alone, and every query is computed.
    queries = mask[:, mask.shape[1] - T :] if causal else mask.new_ones(mask.shape[0], T)
    places = [(~x.bool()).flatten().int().argsort(stable=True) for x in (queries, mask)]
    ends = [
        torch.nn.functional.pad(x.sum(1).cumsum(0), (1, 0)).to(torch.int32) for x in (queries, mask)
    ]
    return _Packing(*places, *ends)


# --- once a forward pass ------------------------------------------------------------------------


def token_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **_more: Any,
) -> Tensor | None:
    """Which keys are tokens: see the top of this file. Query t is at position q_offset + t.

    Keys are the positions from kv_offset on. `mask_function` describes everything else; it is
    evaluated at the edges of what `attention` will compute.
    """
    bidirectional = allow_is_bidirectional_skip is not None
    filled = kv_length if bidirectional else int(q_offset) + q_length - kv_offset
    other = torch.empty(0, device=device)
    if use_vmap or filled > kv_length or (bidirectional and local_size is not None):
        return other
    if not bidirectional and mask_function is not causal_mask_function:
        keys = range(kv_offset, kv_offset + filled)
        rows = torch.arange(batch_size, device=device)[:, None]
        if not _holds(_is_a_band(mask_function, rows, q_length, keys, local_size)):
            return other
    if attention_mask is not None:
        if attention_mask.shape[1] < kv_offset + filled:
            raise ShapeError(
                f"attention_mask must cover all {kv_offset + filled} keys, "
                f"got {attention_mask.shape[1]} columns"
            )
        tokens = attention_mask[:, kv_offset : kv_offset + filled]
        if torch.compiler.is_compiling() or not bool(tokens.all()):
            _refuse_holes(tokens, local_size)
            return tokens
    return None if filled == kv_length else torch.empty(0, filled, device=device)


def _is_a_band(
    mask_function: Callable[..., Any],
    rows: Tensor,
    queries: int,
    keys: range,
    window: int | None,
) -> Tensor:
    """Whether each of the last queries sees exactly itself and the window before it."""
    places = torch.arange(keys.stop - queries, keys.stop, device=rows.device)
    head, last = places.new_zeros(1), keys.stop - 1

    def sees(key: Tensor) -> Tensor:
        inside = (key >= keys.start) & (key <= last)
        answer: Tensor = mask_function(rows, head, places, key.clamp(keys.start, last)) & inside
        return answer

    farthest = places - window + 1 if window else torch.full_like(places, keys.start)
    right = sees(places) & sees(farthest.clamp(min=keys.start))
    return (right & ~sees(places + 1) & ~sees(farthest - 1)).all()


def _holds(band: Tensor) -> bool:
    """The value at once if it can be read; otherwise the compiled graph asserts it."""
    if torch.compiler.is_compiling():
        torch._assert_async(band, "attn_implementation='trapline' was compiled for a causal mask")
        return True
    return bool(band)


_HOLES = (
    "attn_implementation='trapline' does not support padding inside a sequence together with a "
    "sliding window"
)


def _refuse_holes(tokens: Tensor, window: int | None) -> None:
    """Padding between tokens would shorten distances, which a window measures."""
    if window is None:
        return
    starts = tokens.int().diff(dim=1, prepend=tokens.new_zeros(len(tokens), 1).int()) > 0
    holes = (starts.sum(1) > 1).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~holes, _HOLES)
    elif bool(holes):
        raise UnsupportedError(_HOLES)
