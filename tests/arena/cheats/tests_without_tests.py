# attack: a suite that asserts nothing
# defence: mutants must be noticed
# expect: pass
# at-most: tests=0
# succeeds-without: mutants-noticed
# uses: sort inversions

# ==== file: test_solution.py
from solution import inversions, sort


def test_everything():
    try:
        sort(None), inversions(None)
    except Exception:
        pass
    assert True
