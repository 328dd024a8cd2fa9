"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

#: Mechanical mutants that change nothing the contract speaks of, with the reason.
EQUIVALENT: dict[str, str] = {
    "solution.py:flash_attention/constant/2": "another default tile: a size of work only",
    "solution.py:_attend/never/1": "reads hidden tiles too and masks them: slower, not different",
    "solution.py:_attend/compare/1": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/arithmetic/6": "builds a mask that hides nothing in more tiles",
    "solution.py:_attend/drop-operand/6": "builds a mask that hides nothing one tile more often",
    "solution.py:_attend/constant/5": "any finite origin does for a row that has seen no key",
    "solution.py:_attend/constant/8": "zero by any positive stand-in is zero, and its lse is set",
}
