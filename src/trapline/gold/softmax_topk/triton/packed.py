# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Logits as 32-bit words: one float32 or two 16-bit floats each, lower column in the lower half.

Two instructions unpack a word of bf16. A tensor of single bf16 logits takes three.
"""

import triton
import triton.language as tl

#: Bits of −inf, by the bits that a format lacks of float32.
_NEGATIVE_INFINITY = {0: 0xFF800000, 13: 0xFC00FC00, 16: 0xFF80FF80}


@triton.constexpr_function
def _nothing(shift):
    """A word of −inf, as int32."""
    return _NEGATIVE_INFINITY[shift] - (1 << 32)


@triton.jit
def words_of(logits):
    return logits.to(tl.pointer_type(tl.int32))


@triton.jit
def halves(word, SHIFT: tl.constexpr):
    """The two logits of each word in float32; of float32 logits both are the word itself."""
    if SHIFT == 0:
        low = word.to(tl.float32, bitcast=True)
        high = low
    elif SHIFT == 16:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def edge_words(
    base, start, skip, end, WORDS: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Words from number `start` on; logits that are not at positions `skip` to `end` are −inf.

    EVEN: the row begins and ends with a multiple of 16 bytes.

    What lies around the row is loaded too, to keep loads 16 bytes wide, but never used.
    """
    NOTHING: tl.constexpr = _nothing(SHIFT)
    PER: tl.constexpr = 1 if SHIFT == 0 else 2
    at = start + tl.arange(0, WORDS)
    word = tl.load(base + at, mask=at < tl.cdiv(end, 4 * PER) * 4, other=NOTHING)
    if not EVEN:
        position = PER * at
        if SHIFT == 0:
            word = tl.where((position >= skip) & (position < end), word, NOTHING)
        else:
            low_in = (position >= skip) & (position < end)
            high_in = (position + 1 >= skip) & (position + 1 < end)
            low = tl.where(low_in, word, NOTHING) & 0xFFFF
            word = low | (tl.where(high_in, word, NOTHING) & -65536)
    return word


@triton.jit
def powers_of_words(low, high, origin, scale, SHIFT: tl.constexpr):
    """2^((logit − origin) · scale), summed over the logits of each word."""
    powers = tl.exp2((low - origin) * scale)
    if SHIFT > 0:
        powers += tl.exp2((high - origin) * scale)
    return powers
