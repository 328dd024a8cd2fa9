import numpy as np


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def beam_search(lm, prompts, *, beam_width, max_new_tokens, eos_id, length_penalty=1.0):
    """Beam search with length penalty."""
    out = []
    for prompt in prompts:
        # start with beam_width copies of the prompt
        beams = [(list(prompt), 0.0) for _ in range(beam_width)]
        for _ in range(max_new_tokens):
            logits = np.asarray(lm.log_probs([tokens for tokens, _ in beams]))
            log_probs = log_softmax(logits)
            candidates = []
            for i, (tokens, score) in enumerate(beams):
                for token in range(log_probs.shape[1]):
                    if token == eos_id:
                        continue  # finished beams are removed from the search
                    new = tokens + [token]
                    penalised = (score + log_probs[i, token]) / len(new) ** length_penalty
                    candidates.append((new, penalised))
            candidates.sort(key=lambda c: c[1], reverse=True)
            beams = candidates[:beam_width]
        out.append([(tokens, float(score)) for tokens, score in beams])
    return out
