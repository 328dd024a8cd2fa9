"""The gold implementations: eight LLM systems, each with a float64 oracle and a fast path.

Public names are resolved on first use, so that `import trapline.gold` needs NumPy and nothing else.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

#: Public name → the module that defines it. A component adds its names here, one line each.
_HOMES = {
    "beam_search": "beam_search.api",
    "Answer": "decoder.answers",
    "Beams": "decoder.answers",
    "Decoder": "decoder.api",
    "Engine": "decoder.engine",
    "generate": "decoder.generate",
    "Sampling": "decoder.sampling",
    "Speculation": "tree_decoding.speculation",
    "build_tree": "tree_decoding.api",
    "tree_mask": "tree_decoding.api",
    "verify_tree": "tree_decoding.api",
    "KVCache": "kv_cache.api",
    "layer_norm": "norms.api",
    "layer_norm_backward": "norms.api",
    "rms_norm": "norms.api",
    "softmax_topk": "softmax_topk.api",
    "TopK": "softmax_topk.api",
    "flash_attention": "attention.api",
    "flash_attention_backward": "attention.api",
    "flash_attention_lse": "attention.api",
    "flash_attention_varlen": "attention.api",
    "scaled_dot_product_attention": "attention.dropin",
    "paged_attention": "attention.paged.api",
    "paged_append": "attention.paged.api",
    "ternarize": "ternary.api",
    "Ternary": "ternary.api",
    "TernaryLinear": "ternary.layers",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 - the table is the list


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Gold(ModuleType):
    """Keeps a public function visible when its folder has the same name (`softmax_topk`).

    Importing a sub-package sets it as an attribute of its parent. For a public name that would hide
    the function, depending on the order of imports.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Gold
