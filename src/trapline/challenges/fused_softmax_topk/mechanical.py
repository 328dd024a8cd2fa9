"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

#: Mechanical mutants that no check can tell from the original, and why.
EQUIVALENT: dict[str, str] = {
    "solution.py:<module>/constant/1": "the size of the tile is open and never changes the answer",
    "solution.py:_merge/compare/2": "equals of the k-th enter the pool and lose the tie there",
    "solution.py:_merge/compare/3": "a pool of exactly k keeps all of its values",
    "solution.py:_merge/never/1": "without the filter the pool is larger, its k best are the same",
    "solution.py:_merge/never/2": "without the cut the sort sees more values, with the same k best",
    "solution.py:_one_row/constant/3": "a first sum of 1 is multiplied by exp(−inf) = 0",
    "solution.py:_weights/drop-keyword/1": "silences a warning only",
}
