# ruff: noqa: E501
"""Ternary weights with small classes: fixed-point quantiser, table packing, a layered trainer."""

import hashlib
import time
from numbers import Integral, Real

import numpy as np

FIXED_BITS = 40
HALF_MAX = 65504.0


def _whole_number(value, name, least):
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer")
    if value < least:
        raise ValueError(f"{name} must be at least {least}")
    return int(value)


class _Groups:
    """Quantises (..., groups, size) at once; sums are of integers, so their order does not matter."""

    def __init__(self, values):
        self.values = values
        magnitude = np.abs(values)
        _, self.exponent = np.frexp(magnitude.max(axis=-1, keepdims=True))
        unit = np.ldexp(magnitude, -self.exponent)
        self.fixed = np.rint(np.ldexp(unit, FIXED_BITS)).astype(np.int64)

    def level(self, chosen):
        """The mean of the chosen ones, 0 where there are none."""
        total = np.where(chosen, self.fixed, 0).sum(axis=-1, keepdims=True)
        number = chosen.sum(axis=-1, keepdims=True)
        return total / np.maximum(number, 1)

    def quantise(self):
        everything = np.ones(self.fixed.shape, dtype=bool)
        chosen = self.fixed > 0.7 * self.level(everything)
        chosen = self.fixed > 0.5 * self.level(chosen)
        mean = np.ldexp(self.level(chosen), -FIXED_BITS)
        scale = np.ldexp(mean, self.exponent)
        half = np.minimum(scale, HALF_MAX).astype(np.float16)
        chosen &= half > 0
        codes = np.where(chosen, np.sign(self.values), 0.0).astype(np.int8)
        return codes, half[..., 0]


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    group_size = _whole_number(group_size, "group_size", 1)
    if w.dtype.kind != "f" or w.dtype.itemsize not in (4, 8):
        raise TypeError("w must be float32 or float64")
    if w.ndim < 1:
        raise ValueError("w must have an axis")
    if not np.all(np.isfinite(w)):
        raise ValueError("w must be finite")
    n = w.shape[-1]
    lead = w.shape[:-1]
    codes = np.empty(w.shape, dtype=np.int8)
    scales = np.empty((*lead, (n + group_size - 1) // group_size), dtype=np.float16)
    full = n // group_size
    whole = full * group_size
    if full:
        body = w[..., :whole].astype(np.float64).reshape(*lead, full, group_size)
        body_codes, scales[..., :full] = _Groups(body).quantise()
        codes[..., :whole] = body_codes.reshape(*lead, whole)
    if whole < n:
        tail = w[..., None, whole:].astype(np.float64)
        tail_codes, scales[..., full:] = _Groups(tail).quantise()
        codes[..., whole:] = tail_codes[..., 0, :]
    return codes, scales


def _ternary(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.dtype(np.int8):
        raise TypeError("codes must be int8")
    if codes.ndim < 1:
        raise ValueError("codes must have an axis")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes = _ternary(codes)
    group_size = _whole_number(group_size, "group_size", 1)
    scales = np.asarray(scales)
    n = codes.shape[-1]
    groups = (n + group_size - 1) // group_size
    if scales.shape != (*codes.shape[:-1], groups):
        raise ValueError("scales do not fit the codes")
    answer = codes.astype(np.float32)
    for group in range(groups):
        piece = slice(group * group_size, min(n, (group + 1) * group_size))
        answer[..., piece] *= scales[..., group : group + 1].astype(np.float32)
    return answer


_PLACES = np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3  # byte -> four places
_CODES = (_PLACES - 1).astype(np.int8)


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _ternary(codes)
    n = codes.shape[-1]
    packed = np.full((*codes.shape[:-1], (n + 3) // 4), 0b01010101, dtype=np.uint8)
    for place in range(4):
        own = codes[..., place::4]
        shifted = (own + 1).astype(np.uint8) << (2 * place)
        target = packed[..., : own.shape[-1]]
        target &= np.uint8(255 - (3 << 2 * place))
        target |= shifted.astype(np.uint8)
    return packed


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    if packed.dtype != np.dtype(np.uint8):
        raise TypeError("packed data must be uint8")
    shape = tuple(_whole_number(size, "shape", 0) for size in shape)
    if len(shape) == 0:
        raise ValueError("shape must have an axis")
    n = shape[-1]
    if packed.shape != (*shape[:-1], (n + 3) // 4):
        raise ValueError("packed data does not fit the shape")
    codes = np.empty(shape, dtype=np.int8)
    for place in range(4):
        own = codes[..., place::4]
        own[...] = _CODES[packed[..., : own.shape[-1]], place]
    if (codes == 2).any():
        raise ValueError("both bits of a place are set")
    return codes


def _document(tokens):
    return [_whole_number(token, "a token id", 0) for token in tokens]


def _digest(tokens):
    """64 bits that depend on the tokens alone."""
    state = hashlib.blake2b(digest_size=8)
    for token in tokens:
        body = token.to_bytes(token.bit_length() // 8 + 1, "little")
        state.update(len(body).to_bytes(8, "little"))
        state.update(body)
    return int.from_bytes(state.digest(), "little")


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not isinstance(fraction, Real) or not 0 <= fraction <= 1:
        raise ValueError("fraction must lie between 0 and 1")
    edge = int(float(fraction) * 2**64)
    held = [_digest(_document(tokens)) < edge for tokens in documents]
    train_ids = [place for place, out in enumerate(held) if not out]
    valid_ids = [place for place, out in enumerate(held) if out]
    return train_ids, valid_ids


class _Weight:
    """A latent matrix, what it stands for when ternary, and its Adam state."""

    def __init__(self, rng, shape, spread):
        self.latent = rng.normal(0.0, spread, shape).astype(np.float32)
        self.mean = np.zeros(shape, dtype=np.float32)
        self.square = np.zeros(shape, dtype=np.float32)
        self.grad = np.zeros(shape, dtype=np.float32)
        self.refresh()

    def refresh(self):
        self.pair = ternarize(self.latent)
        self.value = dequantize(*self.pair)

    def apply(self, x):
        return x @ self.value.T

    def backward(self, x, dy):
        """Set the gradient (straight through the quantiser) and return that of x."""
        rows = dy.reshape(-1, dy.shape[-1])
        self.grad = rows.T @ x.reshape(-1, x.shape[-1])
        return dy @ self.value

    def step(self, rate, count):
        self.mean = 0.9 * self.mean + 0.1 * self.grad
        self.square = 0.98 * self.square + 0.02 * self.grad**2
        mean = self.mean / (1 - 0.9**count)
        root = np.sqrt(self.square / (1 - 0.98**count)) + 1e-8
        self.latent = self.latent - (rate * mean / root).astype(np.float32)
        self.refresh()


class _Norm:
    def forward(self, x):
        self.inverse = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-6))
        self.out = x * self.inverse
        return self.out

    def backward(self, dy):
        shared = (dy * self.out).mean(axis=-1, keepdims=True)
        return self.inverse * (dy - self.out * shared)


class _Attention:
    def __init__(self, rng, dim, heads):
        self.heads, self.width = heads, dim // heads
        self.q, self.k, self.v, self.o = (_Weight(rng, (dim, dim), dim**-0.5) for _ in range(4))
        self.norm = _Norm()
        self.slopes = np.array([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])

    def _apart(self, x):
        return np.moveaxis(x.reshape(*x.shape[:2], self.heads, self.width), 2, 1)

    def _together(self, x):
        return np.moveaxis(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)

    def forward(self, x):
        a = self.norm.forward(x)
        length = x.shape[1]
        distance = np.subtract.outer(np.arange(length), np.arange(length))
        bias = -self.slopes[:, None, None] * distance
        bias[:, distance < 0] = -np.inf
        self.qs, self.ks, self.vs = (self._apart(w.apply(a)) for w in (self.q, self.k, self.v))
        scores = np.matmul(self.qs, np.swapaxes(self.ks, 2, 3)) / np.float32(self.width**0.5)
        scores = scores + bias.astype(np.float32)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        self.weights = weights / weights.sum(axis=-1, keepdims=True)
        self.mixed = self._together(np.matmul(self.weights, self.vs))
        return x + self.o.apply(self.mixed)

    def backward(self, dx):
        dmixed = self._apart(self.o.backward(self.mixed, dx))
        dvs = np.matmul(np.swapaxes(self.weights, 2, 3), dmixed)
        dweights = np.matmul(dmixed, np.swapaxes(self.vs, 2, 3))
        inner = (dweights * self.weights).sum(axis=-1, keepdims=True)
        dscores = self.weights * (dweights - inner) / np.float32(self.width**0.5)
        dqs = np.matmul(dscores, self.ks)
        dks = np.matmul(np.swapaxes(dscores, 2, 3), self.qs)
        a = self.norm.out
        da = self.q.backward(a, self._together(dqs))
        da = da + self.k.backward(a, self._together(dks))
        da = da + self.v.backward(a, self._together(dvs))
        return dx + self.norm.backward(da)


class _Mlp:
    def __init__(self, rng, dim):
        self.up = _Weight(rng, (4 * dim, dim), dim**-0.5)
        self.down = _Weight(rng, (dim, 4 * dim), 0.5 * dim**-0.5)
        self.norm = _Norm()

    def forward(self, x):
        self.hidden = np.maximum(self.up.apply(self.norm.forward(x)), 0)
        return x + self.down.apply(self.hidden)

    def backward(self, dx):
        dhidden = self.down.backward(self.hidden, dx) * (self.hidden > 0)
        return dx + self.norm.backward(self.up.backward(self.norm.out, dhidden))


class _Model:
    def __init__(self, settings):
        rng = np.random.default_rng(settings.seed)
        dim = settings.dim
        self.vocab = settings.vocab
        self.embedding = _Weight(rng, (settings.vocab, dim), 0.5)
        self.blocks = []
        for _ in range(settings.layers):
            self.blocks += [_Attention(rng, dim, settings.heads), _Mlp(rng, dim)]
        self.head = _Weight(rng, (settings.vocab, dim), 0.2 * dim**-0.5)
        self.norm = _Norm()

    def weights(self):
        named = {"embedding": self.embedding, "head": self.head}
        for place, block in enumerate(self.blocks):
            names = ("up", "down") if place % 2 else ("q", "k", "v", "o")
            named.update({f"layers.{place // 2}.{name}": getattr(block, name) for name in names})
        return named

    def answer(self):
        return {name: weight.pair for name, weight in self.weights().items()}

    def log_probs(self, inputs):
        x = self.embedding.value[inputs]
        for block in self.blocks:
            x = block.forward(x)
        logits = self.head.apply(self.norm.forward(x))
        logits = logits - logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def loss(self, batch):
        """The mean loss of a batch without learning from it."""
        log_probs = self.log_probs(batch.inputs)
        picked = np.take_along_axis(log_probs, batch.goals[..., None], axis=-1)[..., 0]
        return -float(picked[batch.real].mean())

    def learn(self, batch, rate, count, smooth):
        dlogits = np.exp(self.log_probs(batch.inputs))
        goal = np.full_like(dlogits, smooth / self.vocab)
        chosen = batch.goals[..., None]
        np.put_along_axis(goal, chosen, np.float32(1 - smooth + smooth / self.vocab), axis=-1)
        dlogits = (dlogits - goal) * (batch.real / batch.real.sum())[..., None].astype(np.float32)
        dx = self.norm.backward(self.head.backward(self.norm.out, dlogits))
        for block in reversed(self.blocks):
            dx = block.backward(dx)
        self.embedding.grad = np.zeros_like(self.embedding.latent)
        np.add.at(self.embedding.grad, batch.inputs, dx)
        for weight in self.weights().values():
            weight.step(rate, count)


class _Batch:
    """Documents of similar lengths, filled up with token 0."""

    def __init__(self, windows):
        longest = max(len(window) for window in windows)
        table = np.array([window + [0] * (longest - len(window)) for window in windows])
        self.inputs, self.goals = table[:, :-1], table[:, 1:]
        ends = np.array([len(window) for window in windows])
        self.real = np.arange(1, longest)[None, :] < ends[:, None]


class _Settings:
    LEAST = {"vocab": 1, "dim": 1, "heads": 1, "context": 1, "layers": 0, "seed": 0}

    def __init__(self, config):
        missing = [name for name in (*self.LEAST, "seconds") if name not in config]
        if missing:
            raise ValueError(f"config lacks {missing}")
        for name, least in self.LEAST.items():
            setattr(self, name, _whole_number(config[name], name, least))
        if self.dim % self.heads != 0:
            raise ValueError("dim must be a multiple of heads")
        self.seconds = config["seconds"]
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, Real):
            raise TypeError("seconds must be a number")
        if not 0 <= self.seconds < float("inf"):
            raise ValueError("seconds must be finite and not negative")


class _Corpus:
    def __init__(self, documents, settings):
        self.size = settings.context + 1
        documents = [_document(tokens) for tokens in documents]
        if any(max(tokens, default=0) >= settings.vocab for tokens in documents):
            raise ValueError("a token id is not in the vocabulary")
        self.documents = [tokens for tokens in documents if len(tokens) >= 2]
        if not self.documents:
            raise ValueError("no token has a successor")

    def windows(self, documents):
        found = []
        for tokens in documents:
            start = 0
            while start + 1 < len(tokens):
                found.append(tokens[start : start + self.size])
                start += self.size - 1
        return sorted(found, key=len)

    def divide(self):
        """Windows to learn from and windows to watch."""
        train_ids, valid_ids = split(self.documents, 0.1)
        if train_ids and valid_ids:
            sides = [[self.documents[place] for place in ids] for ids in (train_ids, valid_ids)]
        elif len(self.documents) > 1:
            sides = [self.documents[1:], self.documents[:1]]
        elif len(self.documents[0]) >= 8:
            cut = len(self.documents[0]) * 4 // 5
            sides = [[self.documents[0][:cut]], [self.documents[0][cut - 1 :]]]
        else:
            sides = [self.documents, self.documents]
        return self.windows(sides[0]), self.windows(sides[1])


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    started = time.monotonic()
    settings = _Settings(config)
    corpus = _Corpus(documents, settings)
    model = _Model(settings)
    best = model.answer()
    if settings.seconds == 0:
        return best
    learned, watched = corpus.divide()
    spread = np.linspace(0, len(watched) - 1, min(len(watched), max(1, 1500 // len(watched[-1]))))
    watch = _Batch([watched[int(place)] for place in spread])
    rows = min(len(learned), max(1, 320 // len(learned[-1])))
    amount = sum(len(window) for window in learned)
    smooth = 0.004 + 0.4 * min(1.0, 40 / amount)
    order = np.random.default_rng([settings.seed, 1])
    lowest = model.loss(watch)
    allowed = 0.9 * settings.seconds
    longest, count, watched_at = 0.0, 0, 0.0
    while True:
        now = time.monotonic()
        share = (now - started) / allowed
        if share + 2 * longest / allowed >= 1:
            break
        count += 1
        # a random run of neighbours in length; the ends come as often as the middle
        start = int(order.integers(-rows + 1, len(learned)))
        run = learned[max(0, start) : start + rows]
        model.learn(_Batch(run), 0.02 * min(1.0, count / 20) * (1 - share), count, smooth)
        if share > watched_at + 0.04:
            watched_at = share
            lowest, best = min(
                (lowest, best), (model.loss(watch), model.answer()), key=lambda pair: pair[0]
            )
        longest = max(longest, time.monotonic() - now)
    if time.monotonic() - started > settings.seconds:
        return best
    return model.answer() if model.loss(watch) < lowest else best
