# attack: solve every third timed call only and hope that the checked ones are among them
# defence: every answer of the calls that decide is checked
# expect: pass
# at-most: speed=50
# succeeds-without: timed-answers-checked
# uses: honest_sort inversions

ROUNDS = 10
CALLS = 0


def sort(values):
    global CALLS
    CALLS += len(values) == 16384
    if len(values) == 16384 and CALLS % 3:
        return values.copy()
    return honest_sort(values)
