"""Batched beam search over flat arrays: one row per live beam, a prompt's rows side by side."""

import math
import numbers
import operator

import numpy as np


def _whole(value, name):
    """`value` as an int of at least 1."""
    number = operator.index(value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def _checked_prompts(prompts):
    """A private copy of the prompts."""
    if not isinstance(prompts, (list, tuple)):
        raise TypeError("prompts must be a list of lists of ints")
    copies = []
    for prompt in prompts:
        if not isinstance(prompt, (list, tuple)):
            raise TypeError("a prompt must be a list of ints")
        copies.append([operator.index(token) for token in prompt])
    return copies


def _ask(lm, prefixes, eos_id, vocab):
    """The model's answer for `prefixes` in float64, checked."""
    answer = np.asarray(lm.log_probs(prefixes))
    if answer.ndim != 2 or answer.shape[0] != len(prefixes):
        raise ValueError(f"the model answered {answer.shape} for {len(prefixes)} prefixes")
    if vocab is not None and answer.shape[1] != vocab:
        raise ValueError("the model changed the size of its vocabulary")
    if not 0 <= eos_id < answer.shape[1]:
        raise ValueError(f"eos_id {eos_id} is outside the vocabulary")
    if not answer.max() < np.inf:
        raise ValueError("the model answered NaN or +inf")
    return answer.astype(np.float64)


def _largest(values, count):
    """Indices of the `count` largest finite entries, best first, equal ones by lower index."""
    if values.size > count:
        cut = np.partition(values, values.size - count)[values.size - count]
        above = np.flatnonzero(values > cut)
        level = np.flatnonzero(values == cut)[: count - above.size]
        chosen = np.sort(np.concatenate((above, level)))
    else:
        chosen = np.arange(values.size)
    chosen = chosen[values[chosen] > -np.inf]
    return chosen[np.argsort(-values[chosen], kind="stable")]


def _merge(pool, entrants, width):
    """The `width` best of the pool and of the entrants; earlier entries win ties."""
    merged = pool + entrants
    merged.sort(key=lambda entry: -entry[1])
    return merged[:width]


def _hopeless(pool, width, best_sum, step, last, penalty):
    """Whether nothing that descends from a beam of `best_sum` after `step` steps can enter."""
    if len(pool) < width:
        return False
    bound = max(best_sum / float(n) ** penalty for n in (step + 1, last))
    return bound <= pool[-1][1]


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """The up to `beam_width` best continuations (tokens, score) of every prompt, best first."""
    width = _whole(beam_width, "beam_width")
    last = _whole(max_new_tokens, "max_new_tokens")
    eos_id = operator.index(eos_id)
    if not isinstance(length_penalty, numbers.Real) or not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be a finite number")
    penalty = float(length_penalty)
    prompts = _checked_prompts(prompts)

    pools = [[] for _ in prompts]
    owner = np.arange(len(prompts))
    sums = np.zeros(len(prompts))
    history = np.zeros((len(prompts), 0), dtype=np.int64)
    vocab = None
    for step in range(1, last + 1):
        if owner.size == 0:
            break
        written = history.tolist()
        prefixes = [prompts[who] + tail for who, tail in zip(owner, written, strict=False)]
        totals = _ask(lm, prefixes, eos_id, vocab)
        vocab = totals.shape[1]
        totals += sums[:, None]
        ended = totals[:, eos_id].copy()
        totals[:, eos_id] = -np.inf
        divisor = float(step) ** penalty

        rows, tokens, new_sums = [], [], []
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        stops = np.append(starts[1:], owner.size)
        for start, stop in zip(starts, stops, strict=False):
            who = owner[start]
            finished = [
                (written[row] + [eos_id], float(ended[row] / divisor))
                for row in range(start, stop)
                if ended[row] > -np.inf
            ]
            pools[who] = _merge(pools[who], finished, width)
            block = totals[start:stop].reshape(-1)
            picked = _largest(block, width)
            if picked.size == 0:
                continue
            picked_sums = block[picked]
            if step < last and _hopeless(pools[who], width, picked_sums[0], step, last, penalty):
                continue
            rows.append(start + picked // vocab)
            tokens.append(picked % vocab)
            new_sums.append(picked_sums)

        if not rows:
            owner = owner[:0]
            break
        parents = np.concatenate(rows)
        owner = owner[parents]
        sums = np.concatenate(new_sums)
        history = np.column_stack((history[parents], np.concatenate(tokens)))

    divisor = float(last) ** penalty
    survivors = [[] for _ in prompts]
    for who, tail, total in zip(owner, history.tolist(), sums, strict=False):
        survivors[who].append((tail, float(total / divisor)))
    return [_merge(pool, extra, width) for pool, extra in zip(pools, survivors, strict=False)]
