"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

#: Mechanical mutants that no check can tell from the solution, and why.
EQUIVALENT: dict[str, str] = {
    "solution.py:Search._enter/constant/1": "both sequences always have one length",
    "solution.py:Search._enter/drop-keyword/1": "both sequences always have one length",
    "solution.py:Search._expand/constant/2": "both sequences always have one length",
    "solution.py:Search._expand/drop-keyword/1": "both sequences always have one length",
    "solution.py:checked/drop-keyword/1": "adding the float64 sums makes float64 of any answer",
    "solution.py:largest/compare/1": "with as many values as places, all are candidates either way",
    "solution.py:largest/never/1": "the partition only saves time: the sort alone would do",
}
