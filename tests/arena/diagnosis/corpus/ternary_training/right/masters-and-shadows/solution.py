"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md."""

from quantiser import dequantize, pack, ternarize, unpack
from splitting import split
from trainer import train

__all__ = ["dequantize", "pack", "split", "ternarize", "train", "unpack"]
