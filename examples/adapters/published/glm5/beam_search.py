"""Calls `batched_beam_search` with the judge's model in the form that this answer expects."""

import numpy as np
from beam_search import batched_beam_search


class Model:
    """`forward` gives the logits after each of several sequences."""

    def __init__(self, lm):
        self._lm = lm

    def forward(self, token_ids):
        """Log-probabilities are logits, too."""
        return np.asarray(self._lm.log_probs([[int(t) for t in row] for row in token_ids]))


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty):
    """Pairs of tokens and score for each prompt."""
    return batched_beam_search(
        Model(lm), prompts, beam_width, max_new_tokens, alpha=length_penalty, eos_token_id=eos_id
    )
