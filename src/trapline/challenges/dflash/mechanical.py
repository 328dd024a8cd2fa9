"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

#: Mechanical mutants that no check can tell from the solution, and why.
EQUIVALENT: dict[str, str] = {
    "solution.py:<module>/drop-operand/1": "a type alias, read by no code",
    "solution.py:best_tokens/bool/1": "verify_tree refuses picks of another count or rank itself",
    "solution.py:best_tokens/never/1": "verify_tree refuses picks of another count or rank itself",
    "solution.py:build_tree/constant/2": "all weights grow by one, and their order stays",
    "solution.py:generate/constant/6": "the end can only be the last token of the output",
    "solution.py:ranking/compare/1": "with as many values as places, all are candidates either way",
    "solution.py:ranking/compare/3": "prefixes of probability zero may be left out or kept",
    "solution.py:ranking/constant/1": "the partition only saves time: the sort alone would do",
    "solution.py:ranking/never/1": "the partition only saves time: the sort alone would do",
    "solution.py:ranking/constant/2": "both sequences always have one length",
    "solution.py:ranking/drop-keyword/2": "both sequences always have one length",
    "solution.py:verify_sampled/constant/1": "checked_uniforms has compared the lengths",
    "solution.py:verify_sampled/drop-keyword/1": "checked_uniforms has compared the lengths",
    "solution.py:verify_tree/constant/2": "checked_ints has compared the lengths",
    "solution.py:verify_tree/drop-keyword/1": "checked_ints has compared the lengths",
}
