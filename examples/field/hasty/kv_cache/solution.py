import numpy as np


class KV:
    def __init__(self, kind, L, G, D, P, N, bits):
        self.kind, self.L, self.G, self.D, self.P, self.N, self.bits = kind, L, G, D, P, N, bits
        self.data = {}

    def add(self):
        seq = len(self.data)
        self.data[seq] = [[[], []] for _ in range(self.L)]
        return seq

    def append(self, seq, layer, k, v):
        if self._used() + len(k) > self.P * self.N * self.L:
            raise MemoryError("full")
        for i in range(len(k)):
            self.data[seq][layer][0].append(self._enc(k[i]))
            self.data[seq][layer][1].append(self._enc(v[i]))

    def _used(self):
        return sum(len(l[0]) for s in self.data.values() for l in s)

    def _enc(self, x):
        if self.bits is None:
            return x
        # one scale per element, simple and precise
        scale = np.abs(x) / (2 ** (self.bits - 1) - 1) + 1e-8
        return np.round(x / scale).astype(np.int8), scale.astype(np.float32)

    def _dec(self, r):
        return r if self.bits is None else (r[0] * r[1]).astype(np.float64)

    def view(self, seq, layer):
        k, v = self.data[seq][layer]
        return np.array([self._dec(r) for r in k]), np.array([self._dec(r) for r in v])

    def attend(self, seq, layer, q):
        k, v = self.view(seq, layer)
        n, H, D = q.shape
        k = np.tile(k, (1, H // self.G, 1))
        v = np.tile(v, (1, H // self.G, 1))
        s = np.einsum("nhd,shd->hns", q, k) / np.sqrt(D)
        s = s + np.triu(np.full(s.shape[1:], -1e9), 1)
        w = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
        return np.einsum("hns,shd->nhd", w, v).astype(q.dtype)

    def fork(self, seq):
        new = self.add()
        self.data[new] = [[list(k), list(v)] for k, v in self.data[seq]]
        return new

    def keep(self, seq, indices):
        keep = set(indices)
        for kv in self.data[seq]:
            for j in (0, 1):
                kv[j] = [r for i, r in enumerate(kv[j]) if i in keep]

    def truncate(self, seq, n):
        for kv in self.data[seq]:
            kv[0], kv[1] = kv[0][:n], kv[1][:n]

    def free(self, seq):
        self.data[seq] = [[[], []] for _ in range(self.L)]

    def length(self, seq):
        return len(self.data[seq][0][0])

    def nbytes(self):
        size = 4 if self.bits is None else self.bits / 8
        return int(self._used() * 2 * self.G * self.D * size)


def make_cache(kind, *, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits=None):
    return KV(kind, num_layers, num_kv_heads, head_dim, block_size, num_blocks, bits)


def chunked_prefill(cache, seq, layer, q, k, v, chunk):
    outs = []
    for i in range(0, len(q), chunk):
        cache.append(seq, layer, k[i : i + chunk], v[i : i + chunk])
        outs.append(cache.attend(seq, layer, q[i : i + chunk]))
    return np.concatenate(outs)


def max_context(spec, gpu_bytes, *, utilization, weight_bytes, reserve_bytes):
    per = 2 * spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"] * spec["bits"] // 8
    free = gpu_bytes * utilization - weight_bytes - reserve_bytes
    return int(free / per), {"bytes_per_token": per, "budget_bytes": free}
