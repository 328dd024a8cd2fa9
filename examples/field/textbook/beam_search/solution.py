"""Beam search, step by step."""

import math


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    check_settings(beam_width, max_new_tokens, eos_id, length_penalty)
    states = []
    for prompt in prompts:
        for token in prompt:
            if not isinstance(token, int):
                raise TypeError("prompts must contain ints")
        states.append({"prompt": list(prompt), "live": [([], 0.0)], "finished": []})

    for length in range(1, max_new_tokens + 1):
        prefixes = []
        for state in states:
            for tokens, _ in state["live"]:
                prefixes.append(state["prompt"] + tokens)
        if not prefixes:
            break
        rows = ask(lm, prefixes, eos_id)
        position = 0
        for state in states:
            count = len(state["live"])
            if count == 0:
                continue
            my_rows = rows[position : position + count]
            position += count
            one_step(state, my_rows, length, beam_width, max_new_tokens, eos_id, length_penalty)

    return [[(tokens, score) for tokens, score in state["finished"]] for state in states]


def one_step(state, rows, length, beam_width, max_new_tokens, eos_id, length_penalty):
    candidates = []
    for parent, ((tokens, total), row) in enumerate(zip(state["live"], rows)):
        for token, log_prob in enumerate(row):
            if log_prob == -math.inf:
                continue
            if token == eos_id:
                score = (total + log_prob) / length**length_penalty
                state["finished"].append((tokens + [token], score))
            else:
                candidates.append((-(total + log_prob), parent, token))
    # Sorting tuples breaks ties by parent, then by token.
    best = sorted(candidates)[:beam_width]
    state["live"] = [(state["live"][p][0] + [t], -negative) for negative, p, t in best]
    if length == max_new_tokens:
        for tokens, total in state["live"]:
            state["finished"].append((tokens, total / length**length_penalty))
    state["finished"].sort(key=lambda f: -f[1])
    state["finished"] = state["finished"][:beam_width]
    if state["live"] and is_done(state, length, beam_width, max_new_tokens, length_penalty):
        state["live"] = []


def is_done(state, length, beam_width, max_new_tokens, length_penalty):
    if length == max_new_tokens:
        return True
    if len(state["finished"]) < beam_width:
        return False
    best_total = state["live"][0][1]
    best_possible = max(
        best_total / (length + 1) ** length_penalty,
        best_total / max_new_tokens**length_penalty,
    )
    return best_possible <= state["finished"][-1][1]


def ask(lm, prefixes, eos_id):
    answer = lm.log_probs(prefixes)
    if len(answer.shape) != 2 or answer.shape[0] != len(prefixes):
        raise ValueError("log_probs has the wrong shape")
    if eos_id >= answer.shape[1]:
        raise ValueError("eos_id is not in the vocabulary")
    rows = answer.tolist()
    for row in rows:
        for value in row:
            if math.isnan(value) or value == math.inf:
                raise ValueError("log_probs contains NaN or inf")
    return rows


def check_settings(beam_width, max_new_tokens, eos_id, length_penalty):
    for value in (beam_width, max_new_tokens, eos_id):
        if not isinstance(value, int):
            raise TypeError("an int is needed")
    if beam_width < 1 or max_new_tokens < 1 or eos_id < 0:
        raise ValueError("out of range")
    if not math.isfinite(length_penalty):
        raise ValueError("length_penalty must be finite")
