"""The small model, one document at a time in float64, every product an einsum; Adam.

Letters: t and s positions, d width, h heads, w width of a head, u inner width, v vocabulary. The
gradient of an einsum is an einsum with the letters exchanged.
"""

import time

import numpy as np

DOCUMENTS_A_STEP = 8
JUDGES = 24


def shapes_of(config):
    """Every tensor."""
    vocab, dim = config["vocab"], config["dim"]
    shapes = {"embedding": (vocab, dim), "head": (vocab, dim)}
    for i in range(config["layers"]):
        shapes |= {f"layers.{i}.{part}": (dim, dim) for part in "qkvo"}
        shapes |= {f"layers.{i}.up": (4 * dim, dim), f"layers.{i}.down": (dim, 4 * dim)}
    return shapes


def descend(latent, learn, stop, config, shipped, deadline):
    """Adam until the deadline, or until the other pieces stop gaining; the best is kept."""
    rng = np.random.default_rng(config["seed"])
    judges = stop[:JUDGES]
    first = {name: np.zeros_like(w) for name, w in latent.items()}
    second = {name: np.zeros_like(w) for name, w in latent.items()}
    best, best_loss = latent, _mean_loss(shipped(latent), judges, config)
    begun, step, waiting = time.monotonic(), 0, 0
    while time.monotonic() < deadline and waiting < 16:
        step += 1
        done = (time.monotonic() - begun) / max(deadline - begun, 1e-3)
        chosen = rng.integers(len(learn), size=min(DOCUMENTS_A_STEP, len(learn)))
        gradients = _summed(shipped(latent), [learn[i] for i in chosen], config)
        moved = {}
        for name, g in gradients.items():
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.97 * second[name] + 0.03 * g * g
            size = np.sqrt(second[name] / (1 - 0.97**step)) + 1e-12
            rate = 0.1 * max(0.1, 1 - done) * g.shape[1] ** -0.5
            moved[name] = latent[name] - rate * first[name] / (1 - 0.9**step) / size
        latent = moved
        if step % 10 == 0 or time.monotonic() >= deadline:
            waiting += 1
            loss = _mean_loss(shipped(latent), judges, config)
            if loss < best_loss:
                best, best_loss, waiting = latent, loss, 0
    return best


def _mean_loss(weights, documents, config):
    losses = [_Pass(weights, document, config).loss for document in documents]
    return np.sum(losses) / sum(len(document) - 1 for document in documents)


def _summed(weights, documents, config):
    total = {name: np.zeros_like(w) for name, w in weights.items()}
    for document in documents:
        for name, gradient in _Pass(weights, document, config).gradients().items():
            total[name] += gradient
    return total


class _Pass:
    """Forward through one document; what `gradients` needs is kept by layer."""

    def __init__(self, weights, document, config):
        self.weights = weights
        self.layers, self.heads = config["layers"], config["heads"]
        self.tokens, self.targets = np.array(document[:-1]), np.array(document[1:])
        self.back = np.subtract.outer(np.arange(len(self.tokens)), np.arange(len(self.tokens)))
        self.kept = []
        x = weights["embedding"][self.tokens]
        for layer in range(self.layers):
            x = self._feed(layer, self._attend(layer, x))
        self.last, self.root = _norm(x)
        logits = np.einsum("td,vd->tv", self.last, weights["head"])
        self.probs = _softmax(logits)
        rows = np.arange(len(self.targets))
        self.loss = -np.sum(np.log(np.maximum(self.probs[rows, self.targets], 1e-300)))

    def _part(self, layer, part):
        return self.weights[f"layers.{layer}.{part}"]

    def _by_head(self, layer, part):
        w = self._part(layer, part)
        return w.reshape(self.heads, -1, w.shape[1])

    def _attend(self, layer, x):
        a, root = _norm(x)
        q, k, v = (np.einsum("td,hwd->htw", a, self._by_head(layer, part)) for part in "qkv")
        slopes = 2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads)
        scores = np.einsum("htw,hsw->hts", q, k) / q.shape[2] ** 0.5
        scores = np.where(self.back < 0, -np.inf, scores - np.multiply.outer(slopes, self.back))
        shares = _softmax(scores)
        mixed = np.einsum("hts,hsw->htw", shares, v)
        out = self._part(layer, "o").T.reshape(self.heads, -1, x.shape[1])
        self.kept.append((a, root, q, k, v, shares, mixed, out))
        return x + np.einsum("htw,hwd->td", mixed, out)

    def _feed(self, layer, x):
        a, root = _norm(x)
        inner = np.einsum("td,ud->tu", a, self._part(layer, "up")).clip(min=0)
        self.kept.append((a, root, inner))
        return x + np.einsum("tu,du->td", inner, self._part(layer, "down"))

    def gradients(self):
        """Of the summed loss, for every tensor."""
        dlogits = self.probs.copy()
        dlogits[np.arange(len(self.targets)), self.targets] -= 1
        found = {"head": np.einsum("tv,td->vd", dlogits, self.last)}
        dx = _norm_back(np.einsum("tv,vd->td", dlogits, self.weights["head"]), self.last, self.root)
        for layer in reversed(range(self.layers)):
            dx = dx + self._feed_back(layer, dx, found)
            dx = dx + self._attend_back(layer, dx, found)
        found["embedding"] = np.zeros_like(self.weights["embedding"])
        np.add.at(found["embedding"], self.tokens, dx)
        return found

    def _feed_back(self, layer, dx, found):
        a, root, inner = self.kept.pop()
        found[f"layers.{layer}.down"] = np.einsum("td,tu->du", dx, inner)
        dinner = np.einsum("td,du->tu", dx, self._part(layer, "down")) * np.sign(inner)
        found[f"layers.{layer}.up"] = np.einsum("tu,td->ud", dinner, a)
        return _norm_back(np.einsum("tu,ud->td", dinner, self._part(layer, "up")), a, root)

    def _attend_back(self, layer, dx, found):
        a, root, q, k, v, shares, mixed, out = self.kept.pop()
        dim = dx.shape[1]
        found[f"layers.{layer}.o"] = np.einsum("td,htw->dhw", dx, mixed).reshape(dim, dim)
        dmixed = np.einsum("td,hwd->htw", dx, out)
        dshares = np.einsum("htw,hsw->hts", dmixed, v)
        inner = np.einsum("hts,hts->ht", dshares, shares)
        dscores = shares * (dshares - inner[:, :, None]) / q.shape[2] ** 0.5
        pieces = {
            "q": np.einsum("hts,hsw->htw", dscores, k),
            "k": np.einsum("hts,htw->hsw", dscores, q),
            "v": np.einsum("hts,htw->hsw", shares, dmixed),
        }
        da = np.zeros_like(dx)
        for part, piece in pieces.items():
            found[f"layers.{layer}.{part}"] = np.einsum("htw,td->hwd", piece, a).reshape(dim, dim)
            da += np.einsum("htw,hwd->td", piece, self._by_head(layer, part))
        return _norm_back(da, a, root)


def _norm(x):
    root = np.sqrt(np.einsum("td,td->t", x, x) / x.shape[1] + 1e-6)[:, None]
    return x / root, root


def _norm_back(dy, y, root):
    along = np.einsum("td,td->t", dy, y)[:, None] / y.shape[1]
    return (dy - along * y) / root


def _softmax(scores):
    raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)
