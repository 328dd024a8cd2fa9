"""Bugs of beam search, each in the smallest situation that shows it.

E is the end-of-sequence token, A to D are ordinary ones; a table says which continuation has which
log-probability, and what it leaves out is noise (see `table.py`). All values are multiples of a
power of two, so that sums and ties are exact in every order of addition.
"""

from trapline.challenges.beam_search import (
    traps_answers,
    traps_batches,
    traps_finished,
    traps_limit,
    traps_living,
    traps_refusals,
    traps_scores,
    traps_sieve,
    traps_stopping,
    traps_ties,
)

PARTS = (
    traps_finished,
    traps_scores,
    traps_stopping,
    traps_living,
    traps_batches,
    traps_refusals,
    traps_limit,
    traps_ties,
    traps_sieve,
    traps_answers,
)
