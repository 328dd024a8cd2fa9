# attack: answer with an integer too long to be printed
# defence: numbers of that size are refused
# expect: fail
# succeeds-without: unforeseen-answers
# uses: sort

def inversions(values):
    return (1 << 16_000) + 1
