"""Bugs of the forward challenge's softmax have a trap in the backward challenge, too."""

import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.traps import Trap, collect
from trapline.challenges.flash_attention_forward import traps_softmax, traps_tiles

#: Where the trap of the backward challenge has another name.
RENAMED = {
    "output-not-rescaled": "forward-sums-not-rescaled",
    "sum-not-rescaled": "forward-total-not-rescaled",
    "running-maximum-forgotten": "forward-maximum-of-the-last-tile",
    "fully-masked-tile-nan": "forward-empty-rows-nan",
    "exponent-without-maximum": "forward-maximum-forgotten",
    "maximum-starts-at-zero": "maximum-starts-too-high",
    "output-not-normalised": "forward-not-normalised",
}
#: Bugs of queries and of refusals, not of the softmax.
NOT_OF_THE_SOFTMAX = {
    "query-between-tiles-skipped",
    "last-query-of-tiles-skipped",
    "as-many-queries-as-keys",
    "tile-must-divide",
}
TRAPS = [*collect(traps_softmax, Trap), *collect(traps_tiles, Trap)]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.id)
def test_a_softmax_bug_of_the_forward_challenge_has_a_twin(trap):
    known = {twin.id for twin in load("flash_attention_backward").traps}
    names = {trap.id, f"forward-{trap.id}", RENAMED.get(trap.id, trap.id)}
    assert trap.id in NOT_OF_THE_SOFTMAX or names & known
