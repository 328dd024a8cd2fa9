# ruff: noqa: B905, C901, E501
"""Ternary weights with plain functions: sorted quantiser, shift packing, a flat-vector trainer."""

import hashlib
import math
import operator
import time

import numpy as np

LARGEST = float(np.finfo(np.float16).max)


def _group_size(group_size):
    if isinstance(group_size, bool):
        raise TypeError("group_size must be an int")
    group_size = operator.index(group_size)
    if group_size < 1:
        raise ValueError("group_size must be at least 1")
    return group_size


def _by_group(array, size):
    """(..., n) -> (..., groups, size), filled up with zeros."""
    n = array.shape[-1]
    groups = -(-n // size)
    if groups * size != n:
        padded = np.zeros((*array.shape[:-1], groups * size), array.dtype)
        padded[..., :n] = array
        array = padded
    return array.reshape(*array.shape[:-1], groups, size)


def ternarize(w, group_size=128):
    """w (..., n) -> codes int8 (..., n), scales float16 (..., ceil(n / group_size))."""
    w = np.asarray(w)
    group_size = _group_size(group_size)
    if w.dtype not in (np.float32, np.float64):
        raise TypeError("w must be float32 or float64")
    if w.ndim == 0:
        raise ValueError("w needs an axis")
    if not np.isfinite(w).all():
        raise ValueError("w must be finite")
    n = w.shape[-1]
    if w.size == 0:
        return np.zeros(w.shape, np.int8), np.zeros(
            (*w.shape[:-1], -(-n // group_size)), np.float16
        )
    size = min(group_size, n)
    grouped = _by_group(w.astype(np.float64), size)
    magnitude = np.abs(grouped)
    top = magnitude.max(axis=-1, keepdims=True)
    magnitude /= np.where(top > 0, top, 1.0)
    falling = -np.sort(-magnitude, axis=-1)
    total = np.cumsum(falling, axis=-1)
    count = np.arange(1, size + 1)
    keep = np.argmax(total * total / count, axis=-1)[..., None]
    mean = np.take_along_axis(total, keep, -1) / (keep + 1)
    scales = np.minimum(mean * top, LARGEST).astype(np.float16)
    used = (magnitude >= np.take_along_axis(falling, keep, -1)) & (scales > 0)
    codes = (np.sign(grouped) * used).astype(np.int8)
    return codes.reshape(*w.shape[:-1], -1)[..., :n].copy(), scales[..., 0]


def _check_codes(codes):
    codes = np.asarray(codes)
    if codes.dtype != np.int8:
        raise TypeError("codes must be int8")
    if codes.ndim == 0:
        raise ValueError("codes need an axis")
    if ((codes < -1) | (codes > 1)).any():
        raise ValueError("codes must be -1, 0 or 1")
    return codes


def dequantize(codes, scales, group_size=128):
    """code times the scale of its group, float32."""
    codes = _check_codes(codes)
    scales = np.asarray(scales)
    group_size = _group_size(group_size)
    n = codes.shape[-1]
    if scales.shape != (*codes.shape[:-1], -(-n // group_size)):
        raise ValueError("scales do not fit codes")
    group_of = np.arange(n) // group_size
    return codes.astype(np.float32) * scales.astype(np.float32)[..., group_of]


def pack(codes):
    """codes int8 (..., n) -> uint8 (..., ceil(n / 4))."""
    codes = _check_codes(codes)
    quads = _by_group(codes, 4)
    bits = (quads + 1).astype(np.uint8)
    return bits[..., 0] | bits[..., 1] << 2 | bits[..., 2] << 4 | bits[..., 3] << 6


def unpack(packed, shape):
    """The codes of this shape that `pack` put into `packed`."""
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise TypeError("packed data must be uint8")
    shape = tuple(operator.index(s) for s in shape)
    if not shape or min(shape) < 0 or packed.shape != (*shape[:-1], -(-shape[-1] // 4)):
        raise ValueError("packed data does not fit the shape")
    places = packed[..., None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    flat = places.reshape(*shape[:-1], packed.shape[-1] * 4)[..., : shape[-1]]
    if (flat == 3).any():
        raise ValueError("a place with both bits set")
    return flat.astype(np.int8) - np.int8(1)


def _tokens(document):
    tokens = [operator.index(t) for t in document]
    if any(t < 0 for t in tokens):
        raise ValueError("token ids must not be negative")
    return tokens


def split(documents, fraction):
    """(train_ids, valid_ids), decided by each document's content."""
    if not 0 <= fraction <= 1:
        raise ValueError("fraction must be between 0 and 1")
    sides = ([], [])
    for place, document in enumerate(documents):
        text = ",".join(map(str, _tokens(document)))
        digest = hashlib.sha256(text.encode()).digest()
        share = (int.from_bytes(digest[:8], "big") >> 11) / 2.0**53
        sides[share < fraction].append(place)
    return sides


# ---------------------------------------------------------------- the trainer


def _checked_config(config):
    values = {}
    for name, least in (
        ("vocab", 1),
        ("dim", 1),
        ("heads", 1),
        ("context", 1),
        ("layers", 0),
        ("seed", 0),
    ):
        if name not in config:
            raise ValueError(f"config lacks {name}")
        if isinstance(config[name], bool):
            raise TypeError(f"{name} must be an int")
        values[name] = operator.index(config[name])
        if values[name] < least:
            raise ValueError(f"{name} must be at least {least}")
    if values["dim"] % values["heads"]:
        raise ValueError("dim must be divisible by heads")
    if "seconds" not in config:
        raise ValueError("config lacks seconds")
    seconds = config["seconds"]
    if isinstance(seconds, (bool, str)) or not 0 <= seconds < math.inf:
        raise ValueError("seconds must be a number of 0 or more")
    values["seconds"] = float(seconds)
    return values


def _layout(c):
    """[(name, shape, standard deviation at the start)]."""
    d, v = c["dim"], c["vocab"]
    rows = [("embedding", (v, d), 0.5)]
    for i in range(c["layers"]):
        rows += [(f"layers.{i}.{m}", (d, d), d**-0.5) for m in "qkvo"]
        rows += [
            (f"layers.{i}.up", (4 * d, d), d**-0.5),
            (f"layers.{i}.down", (d, 4 * d), 0.5 * d**-0.5),
        ]
    return [*rows, ("head", (v, d), 0.2 * d**-0.5)]


def _views(flat, layout):
    out, at = {}, 0
    for name, shape, _ in layout:
        size = math.prod(shape)
        out[name] = flat[at : at + size].reshape(shape)
        at += size
    return out


def _norm(x):
    r = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return x * r, r


def _norm_back(dy, y, r):
    return r * (dy - y * np.mean(dy * y, axis=-1, keepdims=True))


def _loss_and_grad(p, g, batch, lengths, c, smooth):
    """Sum of losses and their number; fills the gradients g unless g is None."""
    layers, heads, d = c["layers"], c["heads"], c["dim"]
    width = d // heads
    inputs, goals = batch[:, :-1], batch[:, 1:]
    b, t = inputs.shape
    real = np.arange(t) < lengths[:, None] - 1
    far = np.arange(t)[:, None] - np.arange(t)
    slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    bias = np.where(far >= 0, -slopes[:, None, None] * far, -np.inf).astype(np.float32)

    def cut(z):
        return z.reshape(b, t, heads, width).transpose(0, 2, 1, 3)

    def join(z):
        return z.transpose(0, 2, 1, 3).reshape(b, t, d)

    x, tape = p["embedding"][inputs], []
    for i in range(layers):
        n = f"layers.{i}."
        a, ra = _norm(x)
        q, k, v = (cut(a @ p[n + m].T) for m in "qkv")
        s = q @ k.swapaxes(-1, -2) * np.float32(width**-0.5) + bias
        s = np.exp(s - s.max(axis=-1, keepdims=True))
        s /= s.sum(axis=-1, keepdims=True)
        mixed = join(s @ v)
        x = x + mixed @ p[n + "o"].T
        y, ry = _norm(x)
        h = np.maximum(y @ p[n + "up"].T, 0)
        x = x + h @ p[n + "down"].T
        tape.append((a, ra, q, k, v, s, mixed, y, ry, h))
    z, rz = _norm(x)
    logits = z @ p["head"].T
    logits -= logits.max(axis=-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    picked = np.take_along_axis(logp, goals[..., None], -1)[..., 0]
    loss, number = -float((picked * real).sum()), int(real.sum())
    if g is None:
        return loss, number

    def outer(left, right):
        return left.reshape(-1, left.shape[-1]).T @ right.reshape(-1, right.shape[-1])

    dl = np.exp(logp) - np.float32(smooth / c["vocab"])
    np.put_along_axis(
        dl,
        goals[..., None],
        np.take_along_axis(dl, goals[..., None], -1) - np.float32(1 - smooth),
        -1,
    )
    dl *= (real / number)[..., None].astype(np.float32)
    g["head"][...] = outer(dl, z)
    dx = _norm_back(dl @ p["head"], z, rz)
    for i in reversed(range(layers)):
        n = f"layers.{i}."
        a, ra, q, k, v, s, mixed, y, ry, h = tape[i]
        g[n + "down"][...] = outer(dx, h)
        dh = dx @ p[n + "down"] * (h > 0)
        g[n + "up"][...] = outer(dh, y)
        dx = dx + _norm_back(dh @ p[n + "up"], y, ry)
        g[n + "o"][...] = outer(dx, mixed)
        dm = cut(dx @ p[n + "o"])
        ds = dm @ v.swapaxes(-1, -2)
        ds = s * (ds - (ds * s).sum(axis=-1, keepdims=True)) * np.float32(width**-0.5)
        back = {
            "q": join(ds @ k),
            "k": join(ds.swapaxes(-1, -2) @ q),
            "v": join(s.swapaxes(-1, -2) @ dm),
        }
        da = 0
        for m, dz in back.items():
            g[n + m][...] = outer(dz, a)
            da = da + dz @ p[n + m]
        dx = dx + _norm_back(da, a, ra)
    g["embedding"][...] = 0
    np.add.at(g["embedding"], inputs.ravel(), dx.reshape(-1, d))
    return loss, number


def _pieces(documents, longest):
    """Windows of at most `longest` tokens that overlap by one, so that every successor is there once."""
    out = []
    for document in documents:
        for start in range(0, len(document) - 1, longest - 1):
            out.append(document[start : start + longest])
    return out


def _hold_out(documents, longest):
    train_ids, valid_ids = split(documents, 0.1)
    if train_ids and valid_ids:
        groups = ([documents[i] for i in train_ids], [documents[i] for i in valid_ids])
        return _pieces(groups[0], longest), _pieces(groups[1], longest)
    pieces = _pieces(documents, longest)
    if len(pieces) > 1:
        return pieces[:-1], pieces[-1:]
    only = pieces[0]
    if len(only) < 8:
        return pieces, pieces
    edge = len(only) * 3 // 4
    return [only[:edge]], [only[edge - 1 :]]


def _padded(pieces):
    lengths = np.array([len(piece) for piece in pieces])
    batch = np.zeros((len(pieces), lengths.max()), np.int64)
    for row, piece in zip(batch, pieces):
        row[: len(piece)] = piece
    return batch, lengths


def train(documents, config):
    """{name: (codes, scales)} of the small language model."""
    begin = time.perf_counter()
    c = _checked_config(config)
    documents = [_tokens(document) for document in documents]
    if any(t >= c["vocab"] for document in documents for t in document):
        raise ValueError("a token id outside the vocabulary")
    documents = [document for document in documents if len(document) > 1]
    if not documents:
        raise ValueError("no token has a successor")
    layout = _layout(c)
    rng = np.random.default_rng(c["seed"])
    flat = np.concatenate(
        [(rng.standard_normal(shape) * std).ravel() for _, shape, std in layout]
    ).astype(np.float32)
    latent = _views(flat, layout)
    best = {name: ternarize(w) for name, w in latent.items()}
    if c["seconds"] == 0:
        return best
    fit, held = _hold_out(documents, c["context"] + 1)
    rows = max(1, 320 // max(map(len, fit)))
    check = _padded(held[: max(1, 1500 // max(map(len, held)))])
    smooth = 0.004 + 0.4 * min(1.0, 40 / sum(map(len, fit)))
    grad = np.zeros_like(flat)
    grads = _views(grad, layout)
    first, second = np.zeros_like(flat), np.zeros_like(flat)
    limit = 0.9 * c["seconds"]

    def quantised():
        return {name: ternarize(w) for name, w in latent.items()}

    def real(answer):
        return {name: dequantize(*pair) for name, pair in answer.items()}

    def score(answer):
        loss, number = _loss_and_grad(real(answer), None, *check, c, 0.0)
        return loss / number

    lowest = score(best)
    step, slowest, next_check = 0, 0.0, 0.1
    while True:
        now = time.perf_counter()
        spent = (now - begin) / limit
        if spent + 2 * slowest / limit >= 1:
            break
        step += 1
        chosen = rng.choice(len(fit), min(rows, len(fit)), replace=False)
        batch, lengths = _padded([fit[i] for i in chosen])
        _loss_and_grad(real(quantised()), grads, batch, lengths, c, smooth)
        rate = 0.02 * min(1.0, step / 20) * (1 - spent)
        first += 0.1 * (grad - first)
        second += 0.02 * (grad * grad - second)
        flat -= rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.98**step)) + 1e-8)
        if spent >= next_check:
            next_check = spent + 0.04
            answer = quantised()
            loss = score(answer)
            if loss < lowest:
                lowest, best = loss, answer
        slowest = max(slowest, time.perf_counter() - now)
    if time.perf_counter() - begin > c["seconds"]:
        return best
    answer = quantised()
    return answer if score(answer) < lowest else best
