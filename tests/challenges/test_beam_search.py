"""Traps of the beam search challenge that once accused the innocent."""

from types import SimpleNamespace

import numpy as np
import pytest

from trapline.arena.errors import SubmissionRaised, Violation
from trapline.challenges.beam_search.traps_refusals import too_few_rows_accepted


def searching(*sizes):
    """Asks for so many prefixes at a time, whatever it is given."""

    def beam_search(lm, prompts, **settings):
        for size in sizes:
            lm.run("log_probs", (prompts[:size],), {})
        return [[([0], -2.0)] for _ in prompts]

    return SimpleNamespace(beam_search=beam_search)


def test_one_row_for_one_prefix_is_not_too_few():
    too_few_rows_accepted.run(searching(1, 1, 1), np.random.default_rng(1))


@pytest.mark.parametrize("sizes", [(2,), (1, 2), ()])
def test_missing_rows_that_are_accepted_spring_the_trap(sizes):
    with pytest.raises(Violation, match="accepted what ValueError or TypeError should refuse"):
        too_few_rows_accepted.run(searching(*sizes), np.random.default_rng(1))


def test_refused_rows_pass():
    def refuse(lm, prompts, **settings):
        lm.run("log_probs", (prompts,), {})
        raise SubmissionRaised("ValueError", (), "one row is missing")

    too_few_rows_accepted.run(SimpleNamespace(beam_search=refuse), np.random.default_rng(1))
