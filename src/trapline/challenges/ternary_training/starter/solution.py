"""Ternary weights: quantise, pack, split documents, train. The contract is in prompt.md."""


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    raise NotImplementedError


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    raise NotImplementedError


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    raise NotImplementedError


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    raise NotImplementedError


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    raise NotImplementedError


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    raise NotImplementedError
