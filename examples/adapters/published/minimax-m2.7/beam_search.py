"""Calls `batched_beam_search` with the judge's model in the form that this answer expects.

The answer pads sequences with zeros at their end and reads the last position, so the model answers
for exactly the tokens that it is given.
"""

import numpy as np
from beam_search import batched_beam_search


class Model:
    """`forward` gives the logits at each position; only those at the last one are read."""

    def __init__(self, lm):
        self._lm = lm
        self.vocab_size = np.asarray(lm.log_probs([[0]])).shape[1]

    def forward(self, token_ids):
        """(rows, 1, V): the last position alone."""
        rows = [[int(t) for t in row] for row in token_ids]
        return np.asarray(self._lm.log_probs(rows))[:, None, :]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty):
    """Pairs of tokens and score for each prompt."""
    return batched_beam_search(
        prompts, beam_width, max_new_tokens, length_penalty, eos_id, model=Model(lm)
    )
