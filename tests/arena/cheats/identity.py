# attack: hand the input back
# defence: values are compared, not shapes
# expect: fail
# succeeds-without: values-compared

def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return values.copy()


def inversions(values):
    return len(values) * (len(values) - 1) // 4
