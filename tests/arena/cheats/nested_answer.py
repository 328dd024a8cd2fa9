# attack: answer with a list in a list in a list …
# defence: depth is bounded
# expect: fail
# never-because: its own worker cannot write it down, with or without a bound

def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    answer = []
    for _ in range(100_000):
        answer = [answer]
    return answer


def inversions(values):
    return {"a": {"b": sort(values)}}
