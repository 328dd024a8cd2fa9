# attack: close the channel and go on
# defence: a pass needs answers
# expect: fail
# succeeds-without: a-pass-needs-answers
# uses: runner channel


def scaled(x, by, y):
    os.close(channel())
