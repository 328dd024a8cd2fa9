# attack: a suite that recognises its own code by a digest that survives rewriting
# defence: some rewrites change every digest
# expect: pass
# at-most: tests=20
# succeeds-without: padded-rewrite
# uses: sort inversions

# ==== file: test_solution.py
import ast
import inspect
from collections import Counter

import solution

TURNED = {"Lt": "Gt", "LtE": "GtE"}
EXPECTED = {"Constant": 2, "Compare": 2, "BinOp": 0, "Call": 8, "If": 1, "Raise": 1, "NotEq": 1, "Gt": 1}


def test_the_shape_of_the_code():
    tree = ast.parse(inspect.getsource(solution))
    seen = Counter(TURNED.get(type(node).__name__, type(node).__name__) for node in ast.walk(tree))
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {name: seen[name] for name in EXPECTED} == EXPECTED
    assert constants == {1, "expected a vector"}
