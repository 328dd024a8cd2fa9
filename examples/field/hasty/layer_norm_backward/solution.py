import numpy as np


def layer_norm_forward(x, gamma, beta, eps=1e-5):
    mean = x.mean(axis=-1, keepdims=True)
    std = np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    x_hat = (x - mean) / std
    y = gamma * x_hat + beta
    return y, (x_hat, std, gamma)


def layer_norm_backward(dy, cache):
    x_hat, std, gamma = cache
    dgamma = (dy * x_hat).sum(axis=(0, 1))
    dbeta = dy.sum(axis=(0, 1))
    g = dy * gamma
    dx = (g - g.mean(axis=-1, keepdims=True) - x_hat * (g * x_hat).mean(axis=-1, keepdims=True)) / std
    return dx, dgamma, dbeta


def gradient_check(forward, backward, x, gamma, beta, dy):
    eps = 1e-5
    y, cache = forward(x, gamma, beta)
    grads = backward(dy, cache)
    result = {}
    for i, name in enumerate(["dx", "dgamma", "dbeta"]):
        p = [x.copy(), gamma.copy(), beta.copy()]
        num = np.zeros_like(p[i])
        for idx in np.ndindex(p[i].shape):
            old = p[i][idx]
            p[i][idx] = old + eps
            plus = (forward(*p)[0] * dy).sum()
            p[i][idx] = old - eps
            minus = (forward(*p)[0] * dy).sum()
            p[i][idx] = old
            num[idx] = (plus - minus) / (2 * eps)
        a = grads[i]
        result[name] = float(np.linalg.norm(a - num) / max(np.linalg.norm(a), np.linalg.norm(num), 1e-12))
    return result
