"""Flash attention by divide and conquer: halve the problem until a piece fits in a tile."""

import numpy as np


def flash_attention(q, k, v, *, causal=False, tile=64):
    """out (B,H,T,D) and lse (B,H,T); the keys are halved and the partial softmaxes merged."""
    _validate(q, k, v, tile)
    out = np.empty(np.shape(q), q.dtype)
    lse = np.empty(np.shape(q)[:3], q.dtype)
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        for b, h, head in _heads(q, k, v, causal, tile):
            peak, mass, out[b, h] = head.attend_all()
            lse[b, h] = peak + np.log(mass)
    return out, lse


def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """dq, dk, dv; the matrix of scores is cut in halves along its longer side."""
    _validate(q, k, v, tile)
    for x, shape in ((dout, q.shape), (out, q.shape), (lse, q.shape[:3])):
        if np.shape(x) != shape:
            raise ValueError(f"expected shape {shape}, got {np.shape(x)}")
        _need_floats(x)
    dq, dk, dv = np.zeros(q.shape, q.dtype), np.zeros(k.shape, q.dtype), np.zeros(v.shape, q.dtype)
    with np.errstate(over="ignore", under="ignore"):
        for b, h, head in _heads(q, k, v, causal, tile):
            g = h // (q.shape[1] // k.shape[1])
            head.differentiate(dout[b, h], dq[b, h], dk[b, g], dv[b, g])
    return dq, dk, dv


def _heads(q, k, v, causal, tile):
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            yield b, h, _Head(q[b, h], k[b, h // share], v[b, h // share], causal, tile)


def _merge(left, right):
    """Join the softmaxes over two disjoint sets of keys; (-inf, 0, 0) is the neutral element."""
    (m1, l1, a1), (m2, l2, a2) = left, right
    peak = np.maximum(m1, m2)
    safe = np.where(peak == -np.inf, 0, peak)
    w1, w2 = np.exp(m1 - safe), np.exp(m2 - safe)
    return peak, l1 * w1 + l2 * w2, a1 * w1[:, None] + a2 * w2[:, None]


class _Head:
    def __init__(self, q, k, v, causal, tile):
        self.scale = q.dtype.type(q.shape[1] ** -0.5)
        self.q, self.k, self.v = q * self.scale, k, v
        self.causal, self.tile = causal, tile
        self.offset = len(k) - len(q)

    def hidden(self, t1, s0):
        """Whether no query before t1 sees key s0 or a later one."""
        return self.causal and s0 > t1 - 1 + self.offset

    def scores(self, t0, t1, s0, s1):
        s = self.q[t0:t1] @ self.k[s0:s1].T
        if self.causal and s1 - 1 > t0 + self.offset:
            rows, cols = np.ogrid[t0:t1, s0:s1]
            s = np.where(cols > rows + self.offset, s.dtype.type(-np.inf), s)
        return s

    def attend(self, t0, t1, s0, s1):
        """(maximum, sum, weighted values) of queries t0..t1 over keys s0..s1, not yet divided."""
        if s0 >= s1 or self.hidden(t1, s0):
            empty = np.zeros(t1 - t0, self.q.dtype)
            return empty - np.inf, empty, np.zeros((t1 - t0, self.v.shape[1]), self.q.dtype)
        if s1 - s0 > self.tile:
            middle = (s0 + s1) // 2
            return _merge(self.attend(t0, t1, s0, middle), self.attend(t0, t1, middle, s1))
        s = self.scores(t0, t1, s0, s1)
        peak = s.max(axis=1)
        p = np.exp(s - np.where(peak == -np.inf, 0, peak)[:, None])
        return peak, p.sum(axis=1), p @ self.v[s0:s1]

    def attend_all(self):
        """Maximum, sum and output of every query; a query without keys has -inf, 0 and 0."""
        n = len(self.q)
        peak, mass = np.empty(n, self.q.dtype), np.empty(n, self.q.dtype)
        out = np.empty(self.q.shape, self.q.dtype)
        for t0 in range(0, n, self.tile):
            rows = slice(t0, min(t0 + self.tile, n))
            peak[rows], mass[rows], acc = self.attend(t0, rows.stop, 0, len(self.k))
            out[rows] = acc / np.where(mass[rows] == 0, 1, mass[rows])[:, None]
        return peak, mass, out

    def differentiate(self, dout, dq, dk, dv):
        peak, mass, out = self.attend_all()
        blind = max(0, -self.offset) if self.causal else 0
        delta = np.zeros_like(mass)
        delta[blind:] = np.sum(dout[blind:] * out[blind:], axis=1)

        def descend(t0, t1, s0, s1):
            if t0 >= t1 or s0 >= s1 or self.hidden(t1, s0):
                return
            if max(t1 - t0, s1 - s0) > self.tile:
                if t1 - t0 > s1 - s0:
                    middle = (t0 + t1) // 2
                    descend(t0, middle, s0, s1)
                    descend(middle, t1, s0, s1)
                else:
                    middle = (s0 + s1) // 2
                    descend(t0, t1, s0, middle)
                    descend(t0, t1, middle, s1)
                return
            p = np.exp(self.scores(t0, t1, s0, s1) - peak[t0:t1, None]) / mass[t0:t1, None]
            ds = p * (dout[t0:t1] @ self.v[s0:s1].T - delta[t0:t1, None])
            dq[t0:t1] += (ds @ self.k[s0:s1]) * self.scale
            dk[s0:s1] += ds.T @ self.q[t0:t1]
            dv[s0:s1] += p.T @ dout[t0:t1]

        descend(blind, len(self.q), 0, len(self.k))


def _need_floats(x):
    if not np.issubdtype(np.asarray(x).dtype, np.floating):
        raise TypeError("only real floating-point arrays are accepted")


def _validate(q, k, v, tile):
    for x in (q, k, v):
        _need_floats(x)
        if np.ndim(x) != 4:
            raise ValueError("q, k and v have four axes")
    batch, heads, _, width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != width:
        raise ValueError("the shapes of q, k and v do not fit")
    if not k.shape[1] or heads % k.shape[1]:
        raise ValueError("H is not a multiple of G")
    if tile < 1:
        raise ValueError("tile must be at least 1")
