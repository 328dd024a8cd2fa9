"""Flash attention on folded rows: the queries of all heads of a group form one long matrix.

Every group is then an ordinary single-head problem with (H/G) * T rows, and dk and dv need no
summing over heads. Work goes through two preallocated tile buffers.
"""

import numpy as np


class Folded:
    """Checked input, with queries that see no key left out and heads folded into rows."""

    def __init__(self, q, k, v, causal, tile):
        q, k, v = map(np.asarray, (q, k, v))
        for x in (q, k, v):
            if x.dtype.kind != "f":
                raise TypeError("q, k and v must be real floats")
            if x.ndim != 4:
                raise ValueError("q, k and v must have four axes")
        if k.shape != v.shape:
            raise ValueError("k and v must have equal shapes")
        if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise ValueError("q and k must agree in batch and width")
        if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
            raise ValueError("H must be a multiple of G")
        if tile < 1:
            raise ValueError("tile must be at least 1")
        self.shape, self.dtype, self.causal = q.shape, q.dtype, causal
        self.k, self.v = k, v
        self.groups, self.keys = k.shape[1:3]
        queries = q.shape[2]
        if self.keys == 0:
            self.first = queries
        else:
            self.first = max(0, queries - self.keys) if causal else 0
        share = q.shape[1] // self.groups
        self.scale = self.dtype.type(q.shape[3] ** -0.5)
        self.q = self.fold(q) * self.scale
        self.rows = self.q.shape[2]
        # the last key that each row sees
        limits = np.arange(self.first, queries) + self.keys - queries if causal else None
        self.limit = np.tile(limits, share) if causal else np.full(self.rows, self.keys - 1)
        self.height, self.width = min(tile, self.rows), min(tile, self.keys)
        size = self.height * self.width
        self.buffers = np.empty(size, self.dtype), np.empty(size, self.dtype)

    def fold(self, x):
        """(B, H, T, ...) to (B, G, H/G * seeing queries, ...)."""
        x = x[:, :, self.first :]
        rows = x.shape[1] // self.groups * x.shape[2]
        return x.reshape(x.shape[0], self.groups, rows, *x.shape[3:])

    def unfold(self, x, fill):
        """Back to (B, H, T, ...), with `fill` for the queries that see nothing."""
        full = np.full(self.shape[: x.ndim], fill, dtype=self.dtype)
        part = full[:, :, self.first :]
        part[...] = x.reshape(part.shape)
        return full

    def row_tiles(self):
        for r0 in range(0, self.rows, max(1, self.height)):
            yield slice(r0, min(r0 + self.height, self.rows))

    def key_tiles(self, rows):
        for s0 in range(0, int(self.limit[rows].max()) + 1, self.width):
            yield slice(s0, min(s0 + self.width, self.keys))

    def buffer(self, which, rows, cols):
        a, b = rows.stop - rows.start, cols.stop - cols.start
        return self.buffers[which][: a * b].reshape(a, b)

    def scores(self, at, rows, cols):
        s = self.buffer(0, rows, cols)
        np.matmul(self.q[at][rows], self.k[at][cols].T, out=s)
        limit = self.limit[rows]
        if self.causal and cols.stop - 1 > limit.min():
            np.copyto(s, -np.inf, where=np.arange(cols.start, cols.stop) > limit[:, None])
        return s

    def weights(self, at, rows, cols, peak):
        s = self.scores(at, rows, cols)
        np.subtract(s, peak[:, None], out=s)
        return np.exp(s, out=s)

    def peak_and_mass(self, at, rows):
        """Row maxima and, in float64, row sums of exp(score - maximum)."""
        n = rows.stop - rows.start
        peak = np.full(n, -np.inf, dtype=self.dtype)
        for cols in self.key_tiles(rows):
            np.maximum(peak, self.scores(at, rows, cols).max(axis=1), out=peak)
        mass = np.zeros(n)
        for cols in self.key_tiles(rows):
            mass += self.weights(at, rows, cols, peak).sum(axis=1)
        return peak, mass


@np.errstate(over="ignore", under="ignore")
def flash_attention(q, k, v, *, causal=False, tile=64):
    """Attention: out (B,H,T,D) and lse (B,H,T)."""
    f = Folded(q, k, v, causal, tile)
    out = np.zeros(f.q.shape, f.dtype)
    lse = np.zeros(f.q.shape[:3], f.dtype)
    for at in np.ndindex(f.k.shape[:2]):
        for rows in f.row_tiles():
            peak, mass = f.peak_and_mass(at, rows)
            for cols in f.key_tiles(rows):
                out[at][rows] += f.weights(at, rows, cols, peak) @ f.v[at][cols]
            out[at][rows] /= mass[:, None].astype(f.dtype)
            lse[at][rows] = peak + np.log(mass)
    return f.unfold(out, 0), f.unfold(lse, -np.inf)


@np.errstate(over="ignore", under="ignore")
def flash_attention_backward(dout, q, k, v, out, lse, *, causal=False, tile=64):
    """Gradients with respect to q, k and v."""
    f = Folded(q, k, v, causal, tile)
    dout, out, lse = map(np.asarray, (dout, out, lse))
    if dout.shape != f.shape or out.shape != f.shape or lse.shape != f.shape[:3]:
        raise ValueError("dout, out or lse does not fit q")
    if any(x.dtype.kind != "f" for x in (dout, out, lse)):
        raise TypeError("dout, out and lse must be real floats")
    dout = f.fold(dout)
    delta = np.sum(dout * f.fold(out), axis=-1, keepdims=True)
    dq = np.zeros(f.q.shape, f.dtype)
    dk, dv = np.zeros(f.k.shape, f.dtype), np.zeros(f.v.shape, f.dtype)
    for at in np.ndindex(f.k.shape[:2]):
        for rows in f.row_tiles():
            upstream = dout[at][rows]
            peak, mass = f.peak_and_mass(at, rows)
            share = (1 / mass)[:, None].astype(f.dtype)
            for cols in f.key_tiles(rows):
                p = f.weights(at, rows, cols, peak)
                p *= share
                dv[at][cols] += p.T @ upstream
                ds = np.matmul(upstream, f.v[at][cols].T, out=f.buffer(1, rows, cols))
                ds -= delta[at][rows]
                ds *= p
                dk[at][cols] += ds.T @ f.q[at][rows]
                dq[at][rows] += ds @ f.k[at][cols]
    dq *= f.scale
    return f.unfold(dq, 0), dk, dv
