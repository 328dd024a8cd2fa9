# attack: a suite that reads the code instead of running it
# defence: rewrites that behave the same must pass too
# expect: pass
# at-most: tests=20
# succeeds-without: rewrites
# uses: sort inversions

# ==== file: test_solution.py
import inspect

import solution


def test_the_text_is_ours():
    assert "for i, b in enumerate(items)" in inspect.getsource(solution)
    assert "sorted(values.tolist())" in inspect.getsource(solution.sort)
    assert "def inversions(values):" in inspect.getsource(solution)
    assert "return sum(a > b for i, b in enumerate(items) for a in items[:i])" in inspect.getsource(solution)
