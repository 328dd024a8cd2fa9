"""Training an all-ternary language model in torch: schedule, early stopping, exact resumption.

The latent weights get no weight decay: it would drag them over the quantiser's thresholds without
any reason in the data. The best model on held-out windows is what a run returns, not the last one.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.ternary.linear import GROUP, TernaryEmbedding, TernaryLinear, ternarize

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """The model's sizes; the architecture is that of `small_lm`."""

    vocab: int
    dim: int
    layers: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if min(self.vocab, self.dim, self.heads, self.context) < 1 or self.layers < 0:
            raise RangeError(f"sizes must be positive, got {self}")
        if self.dim % self.heads:
            raise RangeError(f"dim {self.dim} does not divide into {self.heads} heads")


@dataclass(frozen=True)
class Recipe:
    """How to train. Rates are relative to a row's typical weight, dim^−½."""

    steps: int = 300
    batch: int = 16
    peak_rate: float = 0.05
    final_rate: float = 0.005
    warm_up: int = 10
    clip: float = 1.0
    evaluate_every: int = 10
    #: Evaluations without a new best before the run ends; None: never.
    patience: int | None = 8
    seed: int = 0


class Block(nn.Module):
    """Attention with a distance penalty, then an MLP; norms have no weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.q, self.k, self.v, self.o = (TernaryLinear(shape.dim, shape.dim) for _ in range(4))
        self.up = TernaryLinear(shape.dim, 4 * shape.dim)
        self.down = TernaryLinear(4 * shape.dim, shape.dim)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        a = _norm(x)
        q, k, v = (self._split(part(a)) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(functional.relu(self.up(_norm(x))))
        return out

    def _split(self, x: Tensor) -> Tensor:
        rows, length, dim = x.shape
        return x.reshape(rows, length, self.heads, dim // self.heads).transpose(1, 2)


class TernaryLM(nn.Module):
    """The small language model of `small_lm`, with every tensor ternary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = TernaryEmbedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = TernaryLinear(shape.dim, shape.vocab)
        with torch.no_grad():
            # A head that begins small begins close to "every token is equally likely".
            self.head.weight.mul_(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, T) → logits (B, T, V)."""
        x = self.embedding(tokens)
        bias = attention_bias(self.shape.heads, tokens.shape[1])
        for block in self.layers:
            x = block(x, bias)
        logits: Tensor = self.head(_norm(x))
        return logits

    def ternaries(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Every tensor by the name that `small_lm` gives it, as codes and scales."""
        found = {}
        for name, weight in self.named_parameters():
            codes, scales = ternarize(weight, GROUP)
            found[name.removesuffix(".weight")] = (codes.numpy(), scales.numpy())
        return found


def attention_bias(heads: int, length: int) -> Tensor:
    """(H, T, T): minus slope times distance back, minus infinity ahead."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return torch.where(back >= 0, -slopes[:, None, None] * back, -torch.inf)


def _norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


@dataclass
class Row:
    """One evaluation: a line of the table that a run leaves."""

    step: int
    train_loss: float
    valid_loss: float
    flipped: float  # share of codes that changed since the evaluation before

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.valid_loss, 700.0))


@dataclass
class Progress:
    """Everything that changes during a run and must survive an interruption."""

    step: int = 0
    best_loss: float = math.inf
    stale: int = 0
    skipped: int = 0
    #: Halved whenever a step had to be skipped.
    rate_factor: float = 1.0
    rows: list[Row] = field(default_factory=list)


class Trainer:
    """One run: `run()` until the steps are done or the held-out loss has stopped falling."""

    def __init__(self, shape: Shape, recipe: Recipe, train: np.ndarray, valid: np.ndarray) -> None:
        for name, data in (("train", train), ("valid", valid)):
            if data.ndim != 2 or data.shape[1] != shape.context + 1 or not len(data):
                raise ShapeError(f"{name} must be (N, {shape.context + 1}), got {data.shape}")
            if data.min() < 0 or data.max() >= shape.vocab:
                raise RangeError(f"{name} holds tokens outside 0..{shape.vocab - 1}")
        self.recipe, self.train, self.valid = (
            recipe,
            torch.from_numpy(train),
            torch.from_numpy(valid),
        )
        torch.manual_seed(recipe.seed)
        self.model = TernaryLM(shape)
        self.best = _copy(self.model)
        # One group a tensor: rates follow the row's typical weight; latent weights never decay.
        self.optimiser = torch.optim.AdamW(
            [{"params": [p], "unit": _unit(name, p)} for name, p in self.model.named_parameters()],
            lr=0.0,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        self.rng = torch.Generator().manual_seed(recipe.seed + 1)
        self.progress = Progress()
        self._codes = self._all_codes()

    def run(
        self, on_row: Callable[[Row], None] = lambda row: None, stop_at: int | None = None
    ) -> TernaryLM:
        """The best model so far. `stop_at` ends early, for a later `load` and `run`."""
        recipe, progress = self.recipe, self.progress
        last = recipe.steps if stop_at is None else min(stop_at, recipe.steps)
        while progress.step < last and not self._stalled():
            loss = self._step()
            if progress.step % recipe.evaluate_every == 0:
                on_row(self._evaluate(loss))
        model = TernaryLM(self.model.shape)
        model.load_state_dict(self.best)
        return model

    def _stalled(self) -> bool:
        return self.recipe.patience is not None and self.progress.stale >= self.recipe.patience

    def _step(self) -> float:
        batch = torch.randint(len(self.train), (self.recipe.batch,), generator=self.rng)
        loss = self.loss(self.train[batch])
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.progress.step += 1
        if not torch.isfinite(norm):
            # A spike is answered by leaving the step out and going on more slowly.
            self.progress.skipped += 1
            self.progress.rate_factor *= 0.5
            return float("nan")
        for group in self.optimiser.param_groups:
            group["lr"] = group["unit"] * self._rate()
        self.optimiser.step()
        return float(loss.detach())

    def _rate(self) -> float:
        """A straight warm-up, then half a cosine down."""
        recipe, step = self.recipe, self.progress.step
        warm = min(1.0, step / max(1, recipe.warm_up))
        fall = 0.5 * (1.0 + math.cos(math.pi * step / recipe.steps))
        rate = recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * fall
        return warm * rate * self.progress.rate_factor

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy of every token but the first of each window."""
        logits = self.model(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def _evaluate(self, train_loss: float) -> Row:
        progress = self.progress
        with torch.no_grad():
            parts = [self.valid[at : at + 64] for at in range(0, len(self.valid), 64)]
            total = sum(float(self.loss(part)) * len(part) for part in parts)
        valid_loss = total / len(self.valid)
        codes = self._all_codes()
        flipped = float((codes != self._codes).float().mean())
        self._codes = codes
        row = Row(progress.step, train_loss, valid_loss, flipped)
        progress.rows.append(row)
        progress.stale += 1
        if valid_loss < progress.best_loss:
            progress.best_loss, progress.stale = valid_loss, 0
            self.best = _copy(self.model)
        return row

    def _all_codes(self) -> Tensor:
        return torch.cat([ternarize(p, GROUP)[0].flatten() for p in self.model.parameters()])

    def save(self, path: Path) -> None:
        """Writes a checkpoint beside its place, then moves it: a full disk leaves the old one."""
        state = {
            "shape": asdict(self.model.shape),
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
            "rng": self.rng.get_state(),
            "codes": self._codes,
            "progress": asdict(self.progress),
        }
        partial = path.with_name(path.name + ".partial")
        try:
            torch.save(state, partial)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Goes on where a checkpoint ended: the same numbers as without the interruption."""
        state: dict[str, Any] = torch.load(path, weights_only=True)
        for name, mine in (("shape", asdict(self.model.shape)), ("recipe", asdict(self.recipe))):
            if state[name] != mine:
                raise ShapeError(f"the checkpoint has another {name}: {state[name]}, here {mine}")
        self.model.load_state_dict(state["model"])
        self.best = state["best"]
        self.optimiser.load_state_dict(state["optimiser"])
        self.rng.set_state(state["rng"])
        self._codes = state["codes"]
        rows = [Row(**row) for row in state["progress"].pop("rows")]
        self.progress = Progress(**state["progress"], rows=rows)


def _unit(name: str, parameter: Tensor) -> float:
    """The typical size of a latent weight at the start."""
    return 1.0 if name.startswith("embedding") else float(parameter.shape[1] ** -0.5)


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
