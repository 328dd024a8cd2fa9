# ruff: noqa: B905, E501, RUF005
"""A ternary language model built of layer objects that know their own gradients."""

from __future__ import annotations

import hashlib
import math
import numbers
import time
from operator import index

import numpy as np

F32 = np.float32


class Quantiser:
    """The least-squares ternary code: of all k, keep the k largest so that (sum of them)^2 / k is greatest."""

    def __init__(self, group_size: int):
        self.size = index(group_size)
        if self.size < 1:
            raise ValueError("group_size below 1")

    def groups(self, n: int) -> int:
        return (n + self.size - 1) // self.size

    @staticmethod
    def _one_width(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """rows (R, m): every row is one group."""
        a = np.abs(rows)
        peak = a.max(axis=1)
        a = a / np.where(peak == 0, 1.0, peak)[:, None]
        falling = -np.sort(-a, axis=1)
        gain = np.cumsum(falling, axis=1) ** 2 / np.arange(1, a.shape[1] + 1)
        border = falling[np.arange(len(a)), gain.argmax(axis=1)]
        kept = a >= border[:, None]
        total = np.where(kept, a, 0.0).sum(axis=1)
        exact = np.minimum(total / kept.sum(axis=1) * peak, 65504.0)
        scale = exact.astype(np.float16)
        codes = np.sign(rows) * (kept & (scale != 0)[:, None])
        return codes.astype(np.int8), scale

    def encode(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lead, n = w.shape[:-1], w.shape[-1]
        flat = np.array(w, dtype=np.float64, order="C").reshape(math.prod(lead), n)
        codes = np.zeros(flat.shape, np.int8)
        scales = np.zeros((len(flat), self.groups(n)), np.float16)
        whole = n - n % self.size
        if flat.size and whole:
            c, s = self._one_width(flat[:, :whole].reshape(-1, self.size))
            codes[:, :whole] = c.reshape(len(flat), whole)
            scales[:, : whole // self.size] = s.reshape(len(flat), -1)
        if flat.size and whole < n:
            codes[:, whole:], scales[:, -1] = self._one_width(np.ascontiguousarray(flat[:, whole:]))
        return codes.reshape(w.shape), scales.reshape(lead + scales.shape[1:])

    def decode(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        wide = (
            np.repeat(scales.astype(F32), self.size, axis=-1)
            if self.size <= codes.shape[-1]
            else scales.astype(F32)
        )
        return codes * (wide[..., : codes.shape[-1]])


class Codec:
    """Four codes a byte."""

    SHIFTS = np.array([0, 2, 4, 6], np.uint8)

    @staticmethod
    def check(codes) -> np.ndarray:
        codes = np.asarray(codes)
        if codes.dtype != np.int8:
            raise TypeError("codes are int8")
        if codes.ndim < 1 or not np.isin(codes, (-1, 0, 1)).all():
            raise ValueError("codes are -1, 0 and 1 along at least one axis")
        return codes

    @classmethod
    def pack(cls, codes: np.ndarray) -> np.ndarray:
        missing = -codes.shape[-1] % 4
        padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
        digits = (
            (padded + 1).astype(np.uint8).reshape(codes.shape[:-1] + (padded.shape[-1] // 4, 4))
        )
        return np.bitwise_or.reduce(digits << cls.SHIFTS, axis=-1)

    @classmethod
    def unpack(cls, packed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        digits = (packed[..., None] >> cls.SHIFTS) & np.uint8(3)
        digits = digits.reshape(packed.shape[:-1] + (packed.shape[-1] * 4,))[..., : shape[-1]]
        if np.any(digits > 2):
            raise ValueError("a place with both bits set")
        return digits.astype(np.int8) - np.int8(1)


QUANTISER = Quantiser(128)


class Weight:
    """A latent matrix, its ternary shadow, its gradient and Adam's moments."""

    def __init__(self, shape, std, rng):
        self.latent = (rng.standard_normal(shape) * std).astype(F32)
        self.std = std
        self.first = np.zeros(shape, F32)
        self.second = np.zeros(shape, F32)
        self.refresh()

    def refresh(self):
        self.codes, self.scales = QUANTISER.encode(self.latent)
        self.value = QUANTISER.decode(self.codes, self.scales)
        self.grad = np.zeros(self.latent.shape, F32)

    def update(self, rate, step):
        self.first = F32(0.9) * self.first + F32(0.1) * self.grad
        self.second = F32(0.98) * self.second + F32(0.02) * self.grad**2
        m, v = self.first / F32(1 - 0.9**step), self.second / F32(1 - 0.98**step)
        self.latent -= F32(rate * self.std) * m / (np.sqrt(v) + F32(1e-8))
        self.refresh()


class Linear:
    def __init__(self, weight: Weight):
        self.weight = weight

    def forward(self, x):
        self.x = x
        return x @ self.weight.value.T

    def backward(self, g):
        self.weight.grad += np.tensordot(g, self.x, axes=((0, 1), (0, 1)))
        return g @ self.weight.value


class Norm:
    def forward(self, x):
        self.inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + F32(1e-6))
        self.y = x * self.inverse
        return self.y

    def backward(self, g):
        return self.inverse * (g - self.y * (g * self.y).mean(axis=-1, keepdims=True))


class Attention:
    def __init__(self, q, k, v, o, heads):
        self.norm, self.heads = Norm(), heads
        self.q, self.k, self.v, self.o = Linear(q), Linear(k), Linear(v), Linear(o)

    def _split(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)

    @staticmethod
    def _join(x):
        x = x.swapaxes(1, 2)
        return x.reshape(*x.shape[:2], -1)

    def forward(self, x):
        a = self.norm.forward(x)
        self.qs, self.ks, self.vs = (self._split(m.forward(a)) for m in (self.q, self.k, self.v))
        self.root = F32(1 / math.sqrt(self.qs.shape[-1]))
        places = np.arange(x.shape[1])
        distance = places[:, None] - places[None, :]
        slopes = 2.0 ** (-8 * (np.arange(self.heads) + 1) / self.heads)
        scores = self.qs @ self.ks.swapaxes(2, 3) * self.root - (
            slopes[:, None, None] * distance
        ).astype(F32)
        scores = np.where(distance >= 0, scores, F32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        self.p = weights / weights.sum(axis=-1, keepdims=True)
        return x + self.o.forward(self._join(self.p @ self.vs))

    def backward(self, g):
        mixed = self._split(self.o.backward(g))
        p_grad = mixed @ self.vs.swapaxes(2, 3)
        s_grad = self.p * (p_grad - (p_grad * self.p).sum(axis=-1, keepdims=True)) * self.root
        back = self.q.backward(self._join(s_grad @ self.ks))
        back = back + self.k.backward(self._join(s_grad.swapaxes(2, 3) @ self.qs))
        back = back + self.v.backward(self._join(self.p.swapaxes(2, 3) @ mixed))
        return g + self.norm.backward(back)


class Mlp:
    def __init__(self, up, down):
        self.norm, self.up, self.down = Norm(), Linear(up), Linear(down)

    def forward(self, x):
        self.hidden = np.maximum(self.up.forward(self.norm.forward(x)), 0)
        return x + self.down.forward(self.hidden)

    def backward(self, g):
        inner = self.down.backward(g) * (self.hidden > 0)
        return g + self.norm.backward(self.up.backward(inner))


class Model:
    def __init__(self, c, rng):
        dim, root = c["dim"], c["dim"] ** -0.5
        self.weights = {"embedding": Weight((c["vocab"], dim), 1.0, rng)}
        self.blocks = []
        for i in range(c["layers"]):
            mine = {name: Weight((dim, dim), root, rng) for name in "qkvo"}
            mine["up"] = Weight((4 * dim, dim), root, rng)
            mine["down"] = Weight((dim, 4 * dim), root / 2, rng)
            self.weights.update({f"layers.{i}.{name}": w for name, w in mine.items()})
            self.blocks.append(Attention(*(mine[name] for name in "qkvo"), c["heads"]))
            self.blocks.append(Mlp(mine["up"], mine["down"]))
        self.weights["head"] = Weight((c["vocab"], dim), root / 2, rng)
        self.norm, self.head = Norm(), Linear(self.weights["head"])

    def forward(self, tokens):
        self.tokens = tokens
        x = self.weights["embedding"].value[tokens]
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(self.norm.forward(x))

    def backward(self, g):
        g = self.norm.backward(self.head.backward(g))
        for block in reversed(self.blocks):
            g = block.backward(g)
        np.add.at(self.weights["embedding"].grad, self.tokens, g)

    def update(self, rate, step):
        for weight in self.weights.values():
            weight.update(rate, step)

    def export(self):
        return {name: (w.codes.copy(), w.scales.copy()) for name, w in self.weights.items()}


class Corpus:
    """Different windows of the documents, some of them held out."""

    def __init__(self, documents, context, rng):
        targets = sum(len(d) - 1 for d in {tuple(d) for d in documents} if d)
        stride = max(1, min(context, targets // 8))
        windows = sorted(
            {tuple(d[i : i + stride + 1]) for d in documents for i in range(0, len(d) - 1, stride)}
        )
        windows = [windows[i] for i in rng.permutation(len(windows))]
        held = min(64, max(1, len(windows) // 10)) if len(windows) > 3 else 0
        self.valid, self.learn = windows[:held], windows[held:]
        self.rows = max(1, 768 // max(map(len, self.learn)))
        self.doubt = 40 / (40 + sum(len(w) - 1 for w in self.learn))

    @staticmethod
    def collate(windows):
        length = max(map(len, windows)) - 1
        table = np.full((len(windows), length + 1), -1)
        for row, window in zip(table, windows):
            row[: len(window)] = window
        return np.maximum(table[:, :-1], 0), table[:, 1:]

    def batches(self, rng):
        while True:
            order = rng.permutation(len(self.learn))
            for i in range(0, len(order), self.rows):
                yield self.collate([self.learn[k] for k in order[i : i + self.rows]])


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


class Trainer:
    def __init__(self, model, corpus, seconds, rng):
        self.model, self.corpus, self.seconds, self.rng = model, corpus, seconds, rng
        self.begin = time.perf_counter()
        self.best, self.best_loss = model.export(), math.inf

    def spent(self):
        return (time.perf_counter() - self.begin) / (0.9 * self.seconds)

    def valid_loss(self, factors=(1.0,)):
        sums, count = np.zeros(len(factors)), 0
        for i in range(0, len(self.corpus.valid), 16):
            x, y = self.corpus.collate(self.corpus.valid[i : i + 16])
            logits = self.model.forward(x)
            for j, factor in enumerate(factors):
                picked = np.take_along_axis(
                    log_softmax(logits * F32(factor)), np.maximum(y, 0)[..., None], -1
                )[..., 0]
                sums[j] -= picked[y >= 0].sum()
            count += (y >= 0).sum()
        return sums / count

    def look(self):
        if self.corpus.valid:
            loss = self.valid_loss()[0]
            if loss < self.best_loss:
                self.best, self.best_loss = self.model.export(), loss
                self.best_head = self.model.weights["head"].latent.copy()

    def step(self, number, x, y):
        p = np.exp(log_softmax(self.model.forward(x)))
        vocab, doubt = p.shape[-1], self.corpus.doubt
        goal = (np.arange(vocab) == y[..., None]) * F32(1 - doubt) + F32(doubt / vocab)
        real = (y >= 0)[..., None]
        self.model.backward(((p - goal) * real / F32(real.sum())).astype(F32))
        self.model.update(0.1 * min(1, number / 20) * max(0.05, 1 - self.spent()), number)

    def run(self):
        seen, length = -1.0, 0.0
        for number, (x, y) in enumerate(self.corpus.batches(self.rng), start=1):
            start = self.spent()
            if start + length >= 1 or number > 20000:
                break
            if start - seen > 0.05:
                seen = start
                self.look()
            self.step(number, x, y)
            length = self.spent() - start
        self.look()
        return self.cool() if self.corpus.valid else self.model.export()

    def cool(self):
        """The best weights, with a head no louder than the held-out windows allow."""
        for name, (codes, scales) in self.best.items():
            self.model.weights[name].value = QUANTISER.decode(codes, scales)
        factors = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25)
        factor = factors[int(self.valid_loss(factors).argmin())]
        self.best["head"] = QUANTISER.encode(self.best_head * F32(factor))
        return self.best


def ternarize(w, group_size=128):
    w, quantiser = np.asarray(w), Quantiser(group_size)
    if w.dtype != np.float32 and w.dtype != np.float64:
        raise TypeError("w is float32 or float64")
    if w.ndim == 0:
        raise ValueError("w has no axis")
    if not np.isfinite(w).all():
        raise ValueError("w holds NaN or infinity")
    return quantiser.encode(w)


def dequantize(codes, scales, group_size=128):
    codes, scales, quantiser = Codec.check(codes), np.asarray(scales), Quantiser(group_size)
    if scales.shape != codes.shape[:-1] + (quantiser.groups(codes.shape[-1]),):
        raise ValueError("scales of the wrong shape")
    return quantiser.decode(codes, scales)


def pack(codes):
    return Codec.pack(Codec.check(codes))


def unpack(packed, shape):
    packed, shape = np.asarray(packed), tuple(map(index, shape))
    if packed.dtype != np.uint8:
        raise TypeError("packed data is uint8")
    if (
        len(shape) == 0
        or any(n < 0 for n in shape)
        or packed.shape != (*shape[:-1], (shape[-1] + 3) // 4)
    ):
        raise ValueError("the bytes do not fit the shape")
    return Codec.unpack(packed, shape)


def split(documents, fraction):
    if not (fraction >= 0 and fraction <= 1):
        raise ValueError("fraction outside 0 ... 1")
    sides = ([], [])
    for number, document in enumerate(documents):
        tokens = list(map(index, document))
        if tokens and min(tokens) < 0:
            raise ValueError("negative token")
        digest = hashlib.sha256(" ".join(f"{t:x}" for t in tokens).encode()).digest()
        place = int.from_bytes(digest[:6], "little") / 2**48
        sides[1 if place < fraction else 0].append(number)
    return sides


def checked(documents, config):
    for name in ("vocab", "dim", "heads", "context", "layers", "seed", "seconds"):
        if name not in config:
            raise ValueError(f"{name} is missing")
    c = {
        name: index(config[name]) for name in ("vocab", "dim", "heads", "context", "layers", "seed")
    }
    if min(c["vocab"], c["dim"], c["heads"], c["context"]) < 1 or min(c["layers"], c["seed"]) < 0:
        raise ValueError("a config value out of range")
    if c["dim"] % c["heads"]:
        raise ValueError("heads do not divide dim")
    if not isinstance(config["seconds"], numbers.Real):
        raise TypeError("seconds is not a number")
    if not 0 <= config["seconds"] < math.inf:
        raise ValueError("seconds out of range")
    documents = [list(map(index, d)) for d in documents]
    if any(not 0 <= t < c["vocab"] for d in documents for t in d):
        raise ValueError("token outside of the vocabulary")
    if not any(len(d) > 1 for d in documents):
        raise ValueError("no token has a successor")
    return documents, c


def train(documents, config):
    documents, c = checked(documents, config)
    rng = np.random.default_rng(c["seed"])
    model = Model(c, rng)
    if config["seconds"] == 0:
        return model.export()
    return Trainer(model, Corpus(documents, c["context"], rng), float(config["seconds"]), rng).run()
