# attack: write answers before anything is asked
# defence: nothing may lie in the channel before a question
# expect: hack
# succeeds-without: verdict-outside nonce
# uses: runner channel

os.write(channel(), frame({"op": "imported", "missing": [], "bytes": 0}))
for _ in range(200):
    os.write(channel(), frame({"op": "result", "returned": "", "right": True}))


def scaled(x, by, y):
    y.zero_()
