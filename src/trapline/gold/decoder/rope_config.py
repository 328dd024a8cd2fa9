"""Rotary positions in `config.json`: `rope_theta`, `rope_scaling` and `rope_parameters`."""

import math
from dataclasses import dataclass, replace
from typing import Any

from trapline.gold.decoder.config_values import flag, positive, real, size
from trapline.gold.errors import RangeError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base, and how they are stretched.

    `dynamic` stretches only beyond the model's context, which sequences here never exceed.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 8192
    #: Of `llama3`: periods in the original context below which waves are long, above which short.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: Of `yarn`: rotations in the original context between which stretching ramps up; cosine and
    #: sine are multiplied by `attention_factor`.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    #: Of `longrope`: divisors of the D/2 frequencies, the long ones where the context exceeds
    #: the original one. They serve every position alike, so that cached keys stay valid.
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool = False

    def for_context(self, context: int) -> "RopeConfig":
        """The same positions for sequences of at most `context` tokens."""
        if self.kind != "longrope":
            return self
        return replace(self, long=context > self.original_context)


def read_ropes(raw: dict[str, Any]) -> tuple[RopeConfig, RopeConfig | None]:
    """Positions of a model, and those of the layers with a window where they have their own."""
    if raw["model_type"] != "gemma3_text":
        return _read_rope(raw), None
    tables = raw.get("rope_parameters") or {}
    if not isinstance(tables, dict):
        raise RangeError(f"rope_parameters must be a JSON object, got {tables!r}")
    stretch = raw.get("rope_scaling") or {}
    if not isinstance(stretch, dict):
        raise RangeError(f"rope_scaling must be a JSON object, got {stretch!r}")
    everywhere = {
        "rope_theta": raw.get("rope_theta") or 1e6,
        **(tables.get("full_attention") or {}),
        **stretch,
    }
    near = {
        "rope_theta": raw.get("rope_local_base_freq") or 1e4,
        **(tables.get("sliding_attention") or {}),
    }
    context = {"max_position_embeddings": raw["max_position_embeddings"]}
    far, local = (_read_rope({**context, "rope_scaling": table}) for table in (everywhere, near))
    return far, local


def _read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`.

    If both are present, `rope_scaling` wins, as in transformers.
    """
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise RangeError(f"rope_scaling must be a JSON object, got {scaling!r}")
    _refuse_unknown_rope(raw, scaling)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # the name in the first files of Phi-3
    if kind not in ROPE_KINDS:
        raise RangeError(f"rope_type must be one of {', '.join(ROPE_KINDS)}, got {kind!r}")
    theta = _theta(raw, scaling)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            positive(scaling, "factor"),
            _original_context(raw, scaling),
            low_freq_factor=positive(scaling, "low_freq_factor"),
            high_freq_factor=positive(scaling, "high_freq_factor"),
        )
    if kind == "yarn":
        return _yarn(raw, scaling, theta)
    if kind == "longrope":
        return _longrope(raw, scaling, theta)
    return RopeConfig(theta, kind, positive(scaling, "factor"))


def _refuse_unknown_rope(raw: dict[str, Any], scaling: dict[str, Any]) -> None:
    """Settings that, if ignored, would silently give another model."""
    if any(isinstance(value, dict) for value in scaling.values()):
        raise RangeError("rope settings that differ by layer type are not supported")
    for table in (raw, scaling):
        if table.get("partial_rotary_factor") not in (None, 1):
            share = table["partial_rotary_factor"]
            raise RangeError(f"partial_rotary_factor must be 1, got {share!r}")


def _theta(raw: dict[str, Any], scaling: dict[str, Any]) -> float:
    usual = RopeConfig.theta
    for table in (scaling, raw):
        if table.get("rope_theta") is not None:
            return positive(table, "rope_theta")
    other = raw.get("rope_parameters")
    lost = other.get("rope_theta") if isinstance(other, dict) else None
    if lost not in (None, usual):
        # transformers takes the default here, which is not what the weights were trained with.
        raise RangeError(
            f"rope_theta {lost!r} of rope_parameters is ignored: move it to rope_scaling"
        )
    return usual


def _original_context(raw: dict[str, Any], scaling: dict[str, Any]) -> int:
    """The context before stretching; a top-level value takes precedence."""
    key = "original_max_position_embeddings"
    for table in (raw, scaling):
        if table.get(key) is not None:
            return size(table, key)
    return size(raw, "max_position_embeddings")


def _yarn(raw: dict[str, Any], scaling: dict[str, Any], theta: float) -> RopeConfig:
    if theta == 1.0:
        raise RangeError("rope_theta of yarn must not be 1: all frequencies would be equal")
    original = _original_context(raw, scaling)
    # A null factor means the ratio of the lengths; a missing factor is an error.
    ratio = size(raw, "max_position_embeddings") / original if "factor" in scaling else None
    factor = positive(scaling, "factor", ratio)
    # For the others 0 means the default.
    given = {key: value for key, value in scaling.items() if value != 0}
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=positive(given, "beta_fast", 32.0),
        beta_slow=positive(given, "beta_slow", 1.0),
        attention_factor=_attention_factor(scaling, factor),
        truncate=flag(scaling, "truncate", default=True),
    )


def _longrope(raw: dict[str, Any], scaling: dict[str, Any], theta: float) -> RopeConfig:
    original, context = _original_context(raw, scaling), size(raw, "max_position_embeddings")
    factor = positive(scaling, "factor", context / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original,
        attention_factor=real(scaling, "attention_factor", usual),
        short_factor=_divisors(scaling, "short_factor"),
        long_factor=_divisors(scaling, "long_factor"),
        long=context > original,
    )


def _divisors(scaling: dict[str, Any], key: str) -> tuple[float, ...]:
    found = scaling[key]
    if not isinstance(found, list) or not found:
        raise RangeError(f"{key} must be a list of positive numbers, got {found!r}")
    return tuple(positive({key: value}, key) for value in found)


def _attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """YaRN scales attention by 1 + 0.1 · mscale · ln(factor) unless the file gives a factor."""

    def growth(scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0

    scale, for_all = real(scaling, "mscale", 0.0), real(scaling, "mscale_all_dim", 0.0)
    if min(scale, for_all) < 0:
        raise RangeError(f"mscale and mscale_all_dim cannot be negative, got {scale}, {for_all}")
    usual = growth(scale) / growth(for_all) if scale and for_all else growth(1.0)
    return real(scaling, "attention_factor", usual)
