#: The work of so many honest answers.
WORK = 80


def slow(x, by, y):
    for _ in range(WORK):
        y.copy_(x * by[:, None])
