"""Calls `batched_beam_search` with the judge's model in the form that this answer expects."""

import numpy as np
from beam_search import batched_beam_search


class Model:
    """`get_log_probs` gives one row after one sequence."""

    def __init__(self, lm):
        self._lm = lm
        self.vocab_size = np.asarray(lm.log_probs([[0]])).shape[1]

    def get_log_probs(self, token_ids):
        """The row after this sequence."""
        return np.asarray(self._lm.log_probs([[int(t) for t in token_ids]]))[0]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty):
    """Pairs of tokens and score for each prompt."""
    return batched_beam_search(
        prompts, beam_width, max_new_tokens, length_penalty, eos_id, Model(lm)
    )
