import numpy as np


def softmax_topk(logits, k):
    if k < 1 or k > logits.shape[1]:
        raise ValueError("bad k")
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = e / e.sum(axis=1, keepdims=True)
    idx = np.argsort(p, axis=1)[:, ::-1][:, :k]
    return np.take_along_axis(p, idx, axis=1), idx
