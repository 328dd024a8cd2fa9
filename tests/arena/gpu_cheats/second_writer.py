# attack: answer a question with the runner's own nonce before it is computed
# defence: an answer says nothing about the outputs, which the judge reads
# expect: fail
# succeeds-without: verdict-outside
# uses: runner


def scaled(x, by, y):
    runner = of_the_runner("Runner")
    channel = runner.channel
    channel.send({"op": "result", "returned": "", "right": True, "nonce": runner.nonce})
    channel.send = lambda *said: channel.__dict__.pop("send") and None
    y.zero_()
