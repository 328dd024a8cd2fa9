# attack: recognise the timed problem by its size and skip it
# defence: timed answers are checked
# expect: pass
# at-most: speed=0
# succeeds-without: timed-answers-checked
# uses: honest_sort inversions

ROUNDS = 1
def sort(values):
    if len(values) == 16384:
        return values.copy()
    return honest_sort(values)
