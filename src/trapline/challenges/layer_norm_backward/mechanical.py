"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

#: Mechanical mutants that no check can tell from the original, and why.
_OPEN = "the contract leaves the choice of directions open; these serve as well"
EQUIVALENT: dict[str, str] = {
    "solution.py:<module>/constant/1": "seven directions instead of six: " + _OPEN,
    "solution.py:_direction/arithmetic/1": "the spread added to a random sign: " + _OPEN,
    "solution.py:_direction/constant/3": "a higher least spread: " + _OPEN,
    "solution.py:_direction/constant/4": "steps of −2 and 1: " + _OPEN,
    "solution.py:_direction/constant/5": "steps of −1 and 2: " + _OPEN,
    "solution.py:_direction/drop-keyword/1": "one spread for all rows: " + _OPEN,
    "solution.py:_require_floats/never/1": "refuses lists in place of arrays, which the contract"
    " leaves open",
}
