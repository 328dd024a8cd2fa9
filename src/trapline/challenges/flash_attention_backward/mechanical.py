"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

#: Mechanical mutants that change nothing the contract speaks of, with the reason.
EQUIVALENT: dict[str, str] = {
    "solution.py:flash_attention/constant/2": "another default tile: a size of work only",
    "solution.py:flash_attention_backward/constant/2": "another default tile: a size of work only",
    "solution.py:flash_attention_backward/never/1": "skips no hidden tile, masks them all",
    "solution.py:flash_attention_backward/compare/1": "skips fewer hidden tiles, then masks them",
    "solution.py:flash_attention_backward/arithmetic/8": "skips fewer hidden tiles, masks them",
    "solution.py:flash_attention_backward/drop-operand/8": "skips fewer hidden tiles, masks them",
    "solution.py:_weights/constant/2": "any finite stand-in does where all scores are -inf",
    "solution.py:_weights/constant/3": "caps at e, not 1: acts only where rounding ate the weight",
    "solution.py:_heard/constant/1": "any small stand-in does in rows whose weights are all 0",
    "solution.py:_attend/never/1": "reads hidden tiles too and masks them: slower, not different",
    "solution.py:_attend/compare/1": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/arithmetic/6": "builds a mask that hides nothing in more tiles",
    "solution.py:_attend/drop-operand/6": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/constant/5": "any finite origin does for a row that has seen no key",
    "solution.py:_attend/constant/8": "zero by any positive stand-in is zero, and its lse is set",
}
