"""The published field: figures of an earlier, hand-written comparison, as data."""

from trapline.published.loader import load

__all__ = ["load"]
