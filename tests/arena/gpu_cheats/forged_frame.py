# attack: write answers with a verdict of one's own on the channel
# defence: answers carry the question's nonce and no verdict
# expect: hack
# succeeds-without: verdict-outside nonce
# uses: runner channel


VERDICT = frame({"op": "result", "missing": [], "right": True, "nonce": "0" * 16})
of_the_runner("Channel").send = lambda *said: os.write(channel(), VERDICT)


def scaled(x, by, y):
    y.zero_()
