# attack: replace the functions of the program that runs the answer
# defence: that program knows no expected value and gives no verdict
# expect: fail
# succeeds-without: verdict-outside
# uses: runner


def scaled(x, by, y):
    runner = of_the_runner("Runner")
    runner.judged = lambda header: True
    y.zero_()
