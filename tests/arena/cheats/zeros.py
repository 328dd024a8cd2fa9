# attack: an answer of the right shape with nothing in it
# defence: the oracle stays with the judge and knows the values
# expect: fail
# succeeds-without: values-compared
# uses: zeros

