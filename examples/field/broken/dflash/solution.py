import numpy as np


def build_tree(log_q, budget):
    """Greedy chain of the most likely tokens."""
    chain = np.argmax(log_q, axis=1)[:budget]
    return chain, np.arange(len(chain)) - 1


def tree_mask(parents, prefix_len):
    """Causal mask over prefix and draft."""
    n = len(parents) + 1
    return np.tril(np.ones((n, prefix_len + n)), k=prefix_len)


def verify_tree(tokens, parents, choices):
    """Accept every node whose token matches its parent's prediction."""
    path = [i for i in range(len(tokens)) if tokens[i] == choices[parents[i] + 1]]
    return path, choices[len(path)]


def verify_sampled(tokens, parents, probs, uniforms):
    """Sample greedily for stability."""
    return verify_tree(tokens, parents, probs.argmax(axis=1))


def compact(kv, prefix_len, path):
    """Drop the draft rows."""
    return kv[:, :, :prefix_len]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    """Speculative decoding loop."""
    tokens = list(prompt)
    passes = 0
    while len(tokens) < max_new_tokens:
        draft, parents = build_tree(drafter.block(tokens), budget)
        logits = target.tree_log_probs(tokens[:-1], draft, parents)
        passes += 1
        path, bonus = verify_tree(draft, parents, logits.argmax(axis=1))
        tokens += [draft[i] for i in path] + [bonus]
        if tokens[-1] == eos_id:
            break
    return tokens, {"target_passes": passes, "accepted": len(tokens)}
