# attack: a suite that passes in the first runs and fails in all later ones
# defence: own code, rewrites and mutants come in random order
# expect: pass
# at-most: tests=20
# succeeds-without: random-order-of-runs
# uses: sort inversions

# ==== file: test_solution.py
import os

HERE = os.path.dirname(os.path.abspath(__file__))
COUNTER = os.path.join(os.path.dirname(HERE), "counter")


def test_is_among_the_first():
    with open(COUNTER, "a") as file:
        file.write("x")
    assert os.path.getsize(COUNTER) <= 5
