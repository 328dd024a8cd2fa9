# attack: return the answer and write nothing, as if returning were enough
# defence: only bytes in the judge's buffers count
# expect: fail
# succeeds-without: verdict-outside


def scaled(x, by, y):
    return x * by[:, None]
