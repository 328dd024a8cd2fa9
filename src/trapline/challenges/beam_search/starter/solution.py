"""Batched beam search. Fill in the body; add whatever helpers, modules and tests you need."""


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations of every prompt.

    lm.log_probs(prefixes) takes a list of n prefixes (lists of ints, prompt included) and returns
    an array (n, V) of log-probabilities of the next token.
    prompts is a list of lists of ints.
    Returns, per prompt, a list of up to `beam_width` pairs (tokens, score), best first.
    """
    raise NotImplementedError
