"""Ternary weights: quantiser, packing, a split without leaks, and a small model trained in them."""

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from model import tensor_shapes
from training import fit

Ternary = tuple[np.ndarray, np.ndarray]
Documents = Sequence[Sequence[int]]
Config = dict[str, Any]
GROUP = 128
LARGEST_SCALE = float(np.finfo(np.float16).max)
VALID_SHARE = 0.15
SETTINGS = {"vocab": 1, "dim": 1, "layers": 0, "heads": 1, "context": 1, "seed": 0}


def ternarize(w: np.ndarray, group_size: int = GROUP) -> Ternary:
    """w (..., n) -> codes int8 (..., n) and scales float16 (..., ceil(n / group_size)).

    A weight counts when its magnitude exceeds half the group's mean magnitude; the scale is the
    mean magnitude of those that count. Weights that are ternary already keep codes and scale.
    """
    w = _finite_floats(w)
    group_size = _positive(group_size, "group_size")
    columns = w.shape[-1]
    # A group wider than the row is the row; filling it up would take memory for nothing.
    group_size = min(group_size, columns or 1)
    magnitude = _grouped(np.abs(w), group_size)
    sizes = _group_sizes(columns, group_size)
    # Each term is divided before the sum, so that no sum can overflow.
    threshold = 0.5 * np.sum(magnitude / sizes[:, None], axis=-1, keepdims=True)
    counts = magnitude > threshold
    counted = np.maximum(np.count_nonzero(counts, axis=-1), 1)
    means = np.sum(magnitude / counted[..., None], axis=-1, where=counts)
    scales = np.minimum(means, LARGEST_SCALE).astype(np.float16)
    # A scale that float16 rounds to zero leaves nothing to tell codes apart by: the group is zero.
    counts &= scales[..., None] > 0
    flags = counts.reshape(*w.shape[:-1], sizes.size * group_size)[..., :columns]
    return np.where(flags, np.sign(w), 0.0).astype(np.int8), scales


def dequantize(codes: np.ndarray, scales: np.ndarray, group_size: int = GROUP) -> np.ndarray:
    """codes times the scale of their group, float32."""
    codes = _ternary_codes(codes)
    scales = np.asarray(scales)
    group_size = _positive(group_size, "group_size")
    groups = _groups_in(codes.shape[-1], group_size)
    if scales.dtype != np.float16 or scales.shape != (*codes.shape[:-1], groups):
        raise ValueError(
            f"scales must be float16 {(*codes.shape[:-1], groups)}, got {scales.shape}"
        )
    owner = np.arange(codes.shape[-1]) // group_size
    return codes.astype(np.float32) * scales.astype(np.float32)[..., owner]


def pack(codes: np.ndarray) -> np.ndarray:
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4)): code + 1 in two bits, the first lowest."""
    codes = _ternary_codes(codes)
    columns = codes.shape[-1]
    slots = np.ones((*codes.shape[:-1], 4 * _groups_in(columns, 4)), dtype=np.uint8)
    slots[..., :columns] += codes.view(np.uint8)
    first, second, third, fourth = (slots[..., place::4] for place in range(4))
    return first | second << 2 | third << 4 | fourth << 6


def unpack(packed: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    shape = tuple(operator.index(size) for size in shape)
    if packed.dtype != np.uint8:
        raise TypeError(f"packed must be uint8, got {packed.dtype}")
    if not shape or min(shape) < 0 or packed.shape != (*shape[:-1], _groups_in(shape[-1], 4)):
        raise ValueError(f"{packed.shape} bytes do not hold codes of shape {shape}")
    slots = (packed[..., None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
    slots = slots.reshape(*packed.shape[:-1], 4 * packed.shape[-1])[..., : shape[-1]]
    if np.any(slots == 3):
        raise ValueError("two set bits stand for no code")
    return slots.astype(np.int8) - np.int8(1)


def split(documents: Documents, fraction: float) -> tuple[list[int], list[int]]:
    """Indices for training and for validation; a document's content alone decides its side."""
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
    sides = [_draw(document) < fraction for document in documents]
    train = [index for index, held_out in enumerate(sides) if not held_out]
    valid = [index for index, held_out in enumerate(sides) if held_out]
    return train, valid


def train(documents: Documents, config: Config) -> dict[str, Ternary]:
    """Train the small model; every tensor comes back as (codes, scales)."""
    config = _checked_config(config)
    pieces = _pieces(documents, config)
    chosen, held_out = _hold_out(pieces)
    latent = fit(
        [pieces[i] for i in chosen],
        [pieces[i] for i in held_out],
        config,
        lambda w: dequantize(*ternarize(w, GROUP), GROUP),
    )
    return {name: ternarize(latent[name], GROUP) for name in tensor_shapes(config)}


def _hold_out(pieces: Documents) -> tuple[list[int], list[int]]:
    """Like `split`, but neither side is empty as soon as two pieces differ."""
    draws = [_draw(piece) for piece in pieces]
    ranked = sorted(set(draws))
    limit = ranked[max(1, round(VALID_SHARE * len(ranked))) - 1]
    held_out = [index for index, draw in enumerate(draws) if draw <= limit]
    chosen = [index for index, draw in enumerate(draws) if draw > limit]
    return chosen or held_out, held_out


def _draw(document: Sequence[int]) -> float:
    """A number in [0, 1) that looks random and depends on the tokens alone."""
    text = ",".join(str(operator.index(token)) for token in document)
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2.0**48


def _pieces(documents: Documents, config: Config) -> list[np.ndarray]:
    """Documents as token arrays, cut where they are longer than the model can see."""
    length = config["context"] + 1
    pieces = []
    for document in documents:
        tokens = [operator.index(token) for token in document]
        if tokens and not 0 <= min(tokens) <= max(tokens) < config["vocab"]:
            raise ValueError(f"token ids must lie in 0..{config['vocab'] - 1}")
        for begin in range(0, len(tokens) - 1, config["context"]):
            pieces.append(np.array(tokens[begin : begin + length]))
    if not pieces:
        raise ValueError("no document has two tokens: there is nothing to predict")
    return pieces


def _checked_config(config: Config) -> Config:
    """A copy of the config with plain numbers, or a refusal."""
    missing = [name for name in (*SETTINGS, "seconds") if name not in config]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}")
    checked = {name: _at_least(config[name], low, name) for name, low in SETTINGS.items()}
    if checked["dim"] % checked["heads"]:
        raise ValueError(f"dim {checked['dim']} does not divide into {checked['heads']} heads")
    if not config["seconds"] >= 0:
        raise ValueError(f"seconds must not be negative, got {config['seconds']}")
    return {**checked, "seconds": float(config["seconds"])}


def _finite_floats(w: np.ndarray) -> np.ndarray:
    """The weights in float64, or a refusal."""
    w = np.asarray(w)
    if w.dtype not in (np.float32, np.float64):
        raise TypeError(f"weights must be float32 or float64, got {w.dtype}")
    if w.ndim == 0:
        raise ValueError("weights need at least one axis")
    if not np.isfinite(w).all():
        raise ValueError("weights must be finite")
    return w.astype(np.float64)


def _ternary_codes(codes: np.ndarray) -> np.ndarray:
    """The codes, contiguous, or a refusal."""
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError(f"codes must be int8, got {codes.dtype}")
    if codes.ndim == 0:
        raise ValueError("codes need at least one axis")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return np.ascontiguousarray(codes)


def _positive(value: int, name: str) -> int:
    """An integer from 1 on, or a refusal."""
    return _at_least(value, 1, name)


def _at_least(value: int, low: int, name: str) -> int:
    """An integer from `low` on, or a refusal."""
    value = operator.index(value)
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return value


def _groups_in(columns: int, group_size: int) -> int:
    """How many groups a row has, a short last one included."""
    return -(-columns // group_size)


def _group_sizes(columns: int, group_size: int) -> np.ndarray:
    """How many weights each group has: all full but perhaps the last."""
    starts = np.arange(_groups_in(columns, group_size)) * group_size
    return np.minimum(columns - starts, group_size)


def _grouped(values: np.ndarray, group_size: int) -> np.ndarray:
    """(..., n) -> (..., groups, group_size), the last group filled up with zeros."""
    columns = values.shape[-1]
    groups = _groups_in(columns, group_size)
    padded = np.zeros((*values.shape[:-1], groups * group_size))
    padded[..., :columns] = values
    return padded.reshape(*values.shape[:-1], groups, group_size)
