"""Beam search in plain Python: every continuation is a tuple, and order is the order of tuples."""

import math


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations (tokens, score) of every prompt, best first."""
    _check(beam_width, max_new_tokens, eos_id, length_penalty)
    prompts = [_tokens(prompt) for prompt in prompts]
    live = [[(0.0, ())] for _ in prompts]
    pools = [[] for _ in prompts]
    for length in range(1, max_new_tokens + 1):
        owners = [(p, b) for p, beams in enumerate(live) for b in range(len(beams))]
        if not owners:
            break
        rows = _rows(lm, [list(prompts[p] + live[p][b][1]) for p, b in owners], eos_id)
        continued = [[] for _ in prompts]
        for (p, b), row in zip(owners, rows, strict=True):
            continued[p] += _continuations(live[p][b], b, row)
        for p in {p for p, _ in owners}:
            norm = length**length_penalty
            ended = [
                (n / norm, length, 0, b, t, seq) for n, b, t, seq in continued[p] if t == eos_id
            ]
            best = sorted(c for c in continued[p] if c[2] != eos_id)[:beam_width]
            if length == max_new_tokens:
                ended += [(n / norm, length, 1, b, t, seq) for n, b, t, seq in best]
            pools[p] = sorted(pools[p] + ended)[:beam_width]
            live[p] = [(-negative, tokens) for negative, _, _, tokens in best]
            if _settled(live[p], pools[p], length, beam_width, max_new_tokens, length_penalty):
                live[p] = []
    return [[(list(entry[5]), -entry[0]) for entry in pool] for pool in pools]


def _continuations(beam, number, row):
    """(negative sum, parent beam, token, tokens) of everything possible: sorts best first."""
    total, tokens = beam
    return [
        (-(total + log_prob), number, token, (*tokens, token))
        for token, log_prob in enumerate(row)
        if log_prob > -math.inf
    ]


def _settled(live, pool, length, width, longest, penalty):
    if not live or len(pool) < width:
        return not live
    # For every length that is still possible, the best that the best beam could do.
    reachable = [live[0][0] / n**penalty for n in range(length + 1, longest + 1)]
    worst = -pool[-1][0]
    return all(score <= worst for score in reachable)


def _rows(lm, prefixes, eos_id):
    answer = lm.log_probs(prefixes)
    if getattr(answer, "ndim", 2) != 2:
        raise ValueError("log_probs must answer a matrix")
    rows = [[float(value) for value in row] for row in answer]
    if len(rows) != len(prefixes):
        raise ValueError("log_probs must answer one row a prefix")
    for row in rows:
        if eos_id >= len(row):
            raise ValueError("eos_id is outside the vocabulary")
        if any(math.isnan(value) or value == math.inf for value in row):
            raise ValueError("log_probs holds NaN or +inf")
    return rows


def _tokens(prompt):
    return tuple(_whole(token) for token in prompt)


def _whole(value):
    if isinstance(value, float):
        raise TypeError("an integer is needed")
    return int(value)


def _check(width, longest, eos_id, penalty):
    if _whole(width) < 1 or _whole(longest) < 1 or _whole(eos_id) < 0:
        raise ValueError("beam_width and max_new_tokens start at 1, eos_id at 0")
    if not math.isfinite(penalty):
        raise ValueError("length_penalty must be finite")
