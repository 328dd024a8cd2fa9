"""Calls this answer's search with the judge's model."""

from search import batched_beam_search


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty):
    def model(prefix):
        return lm.log_probs([list(prefix)])[0]

    return batched_beam_search(model, prompts, beam_width, max_new_tokens, length_penalty, eos_id)
