import numpy as np


def build_tree(log_q, budget):
    L, V = log_q.shape
    tokens, parents, weights = [], [], []
    cands = [(log_q[0, t], -1, t, 0) for t in range(V)]
    while cands and len(tokens) < budget:
        i = int(np.argmax([c[0] for c in cands]))
        w, p, t, d = cands.pop(i)
        tokens.append(t)
        parents.append(p)
        if d + 1 < L:
            cands += [(w + log_q[d + 1, u], len(tokens) - 1, u, d + 1) for u in range(V)]
    return np.array(tokens), np.array(parents)


def tree_mask(parents, prefix_len):
    n = len(parents)
    mask = np.zeros((n + 1, prefix_len + n + 1), dtype=bool)
    mask[:, : prefix_len + 1] = True
    for i in range(n):
        j = i
        while j >= 0:
            mask[i + 1, prefix_len + 1 + j] = True
            j = parents[j]
    return mask


def verify_tree(tokens, parents, choices):
    # tree_logits = logits[len(prefix):], one row per node
    path = []
    last = -1
    for i in range(len(tokens)):
        if parents[i] == last and tokens[i] == choices[i]:
            path.append(i)
            last = i
    return path, int(choices[last + 1])


def verify_sampled(tokens, parents, probs, uniforms):
    choices = [int(np.searchsorted(np.cumsum(p), u)) for p, u in zip(probs, uniforms)]
    return verify_tree(tokens, parents, choices)


def compact(kv, prefix_len, path):
    return kv[..., : prefix_len + 1 + len(path), :]


def generate(target, drafter, prompt, *, max_new_tokens, eos_id, budget):
    out = []
    passes = accepted = 0
    while len(out) < max_new_tokens:
        prefix = list(prompt) + out
        tokens, parents = build_tree(drafter.block(prefix), budget)
        logits = target.tree_log_probs(prefix, tokens, parents)
        passes += 1
        path, bonus = verify_tree(tokens, parents, logits.argmax(axis=1))
        accepted += len(path)
        out += [int(tokens[i]) for i in path] + [bonus]
        if out[-1] == eos_id:
            break
    return out, {"target_passes": passes, "accepted": accepted}
