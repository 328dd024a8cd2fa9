"""A split of documents by what they say."""

from hashlib import blake2b
from operator import index

CODE_BYTES = 6  # 48 bits are exact in a float


def _fingerprint(document):
    """A number in [0, 1) that depends on the tokens alone. Hexadecimal, as int() refuses long decimals."""
    tokens = [index(token) for token in document]
    if any(token < 0 for token in tokens):
        raise ValueError("token ids must not be negative")
    text = "".join(f"{token:x}," for token in tokens)
    digest = blake2b(text.encode(), digest_size=CODE_BYTES).digest()
    return int.from_bytes(digest, "big") / 256**CODE_BYTES


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must lie between 0 and 1")
    share = float(fraction)
    sides = ([], [])
    for place, document in enumerate(documents):
        sides[_fingerprint(document) < share].append(place)
    return sides
