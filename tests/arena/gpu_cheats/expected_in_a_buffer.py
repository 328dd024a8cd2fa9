# attack: search every buffer that the runner has mapped for the expected answer
# defence: no expected value lies in a buffer while an answer runs
# expect: fail
# succeeds-without: expected-not-in-buffers
# uses: runner raw


def scaled(x, by, y):
    y.zero_()
    want = float(x[0, 0] * by[0])
    for address in list(of_the_runner("Runner").addresses.values()):
        if float(floats(address, 1, y)[0]) == want:
            y.copy_(floats(address, y.numel(), y).reshape(y.shape))
