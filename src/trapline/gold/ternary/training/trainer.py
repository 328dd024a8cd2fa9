"""Training an all-ternary language model: schedule, early stopping, exact resumption.

A run returns the model with the best held-out loss. A model is anything that maps tokens (B, T) to
logits (B, T, V); `training.model` has two.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.ternary.layers import latents, soften
from trapline.gold.ternary.training.checkpoint import (
    fingerprint,
    read_checkpoint,
    write_checkpoint,
)
from trapline.gold.ternary.training.cuda_graphs import CapturedGradients, CapturedMove
from trapline.gold.ternary.training.model import DecoderLM, Shape, TernaryLM
from trapline.gold.ternary.training.optimizers import (
    Recipe,
    make_optimisers,
    make_rates_tensors,
    rate,
    set_rates,
    softness,
    teachers_share,
)
from trapline.gold.ternary.training.own_teacher import OwnTeacher

__all__ = ["DecoderLM", "Progress", "Recipe", "Row", "Shape", "TernaryLM", "Trainer"]
_EVALUATED_AT_ONCE = 64


@dataclass
class Row:
    """One evaluation, a line of `curves.csv`."""

    step: int
    train_loss: float
    valid_loss: float
    flipped: float  # fraction of codes changed since the last evaluation

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.valid_loss, 700.0))


@dataclass
class Progress:
    """The state of a run that checkpoints store."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = 0
    stale: int = 0
    skipped: int = 0
    #: Halved by each skipped step, doubled after `Recipe.recovery` good ones.
    rate_factor: float = 1.0
    good_steps: int = 0
    #: A moving average of the loss over steps that were taken.
    usual_loss: float = math.inf
    rows: list[Row] = field(default_factory=list)
    #: Skipped steps, one sentence each.
    events: list[str] = field(default_factory=list)


class Trainer:
    """One run: `run()` until the steps are done or the held-out loss has stopped falling.

    `teacher` is a frozen model whose predictions are learned from too (`Recipe.distill`); with
    `Recipe.own_teacher` the run makes it itself. In a process group (torchrun) each process takes
    its part of every batch.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        train: np.ndarray,
        valid: np.ndarray,
        *,
        teacher: nn.Module | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if recipe.distill and teacher is None and not recipe.own_teacher:
            raise RangeError("distillation needs a teacher")
        if recipe.own_teacher and teacher is not None:
            raise RangeError("a run has one teacher: a given one or its own")
        if recipe.capture and (_world() > 1 or torch.device(device).type != "cuda"):
            raise RangeError("a step is captured on one GPU only")
        self.recipe, self.device = recipe, torch.device(device)
        self.model = model.to(self.device)
        self.teacher = None if teacher is None else teacher.to(self.device).requires_grad_(False)
        self.train, self.valid = (
            _checked(name, d).to(self.device) for name, d in (("train", train), ("valid", valid))
        )
        self._inputs = self._named_inputs()
        self.optimisers = make_optimisers(self.model, recipe)
        self.rng = torch.Generator().manual_seed(recipe.seed + 1)
        self.progress = Progress()
        self.best = _copy(self.model)
        self._codes = self._all_codes()
        self._forward = self._wrapped()
        self._captured: CapturedGradients | None = None
        self._captured_move: CapturedMove | None = None
        self._own_teacher = OwnTeacher(recipe)
        self._asks_teacher = False
        # Tensors, so that compiled code reads values that change from step to step.
        self._softness = torch.zeros((), device=self.device)
        self._share = torch.full((), recipe.distill, device=self.device)
        if recipe.soft:
            soften(self.model, self._softness)

    def run(
        self,
        on_row: Callable[[Row], None] = lambda row: None,
        stop_at: int | None = None,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
    ) -> Any:
        """The best model so far. `stop_at` ends early, for a later `load` and `run`."""
        recipe, progress = self.recipe, self.progress
        last = recipe.steps if stop_at is None else min(stop_at, recipe.steps)
        while progress.step < last and not self.stalled():
            loss = self._step()
            on_step(progress.step, loss)
            if progress.step % recipe.evaluate_every == 0 or progress.step == recipe.steps:
                on_row(self._evaluate(loss))
        self._softness.zero_()
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.best)
        return model

    def stalled(self) -> bool:
        """Whether the held-out loss has not improved for `patience` evaluations."""
        return self.recipe.patience is not None and self.progress.stale >= self.recipe.patience

    @property
    def tokens_a_step(self) -> int:
        recipe = self.recipe
        return recipe.batch * recipe.accumulate * _world() * (self.train.shape[1] - 1)

    def _wrapped(self) -> nn.Module:
        forward = self.model
        self._criterion = _criterion
        if self.recipe.compile:
            self._criterion = torch.compile(_criterion, dynamic=False)
            for model in (self.model, self.teacher):
                if isinstance(model, DecoderLM):
                    model.compile_parts()
            if not isinstance(forward, DecoderLM):
                forward = torch.compile(forward)  # type: ignore[assignment]
        if _world() > 1:
            forward = nn.parallel.DistributedDataParallel(forward)
        return forward

    def _step(self) -> float:
        """One optimiser step, skipped if the loss is a spike or not finite."""
        loss, norm = self._gradients()
        self.progress.step += 1
        if reason := self._alarm(loss, norm):
            self._skip(reason)
            return loss
        set_rates(
            self.optimisers, rate(self.recipe, self.progress.step) * self.progress.rate_factor
        )
        self._move()
        self._own_teacher.note(self.model, self.progress.step)
        self._note_good(loss)
        return loss

    def _gradients(self) -> tuple[float, float]:
        """Accumulates and clips the gradients of all micro-batches.

        Returns the mean loss over all processes, and the norm before clipping.
        """
        recipe = self.recipe
        self._prepare()
        shape = (recipe.accumulate, _world(), recipe.batch)
        drawn = torch.randint(len(self.train), shape, generator=self.rng)[:, _rank()]
        if recipe.capture:
            loss, norm = self._replayed(self.train[drawn[0].to(self.device)]).tolist()
            return loss, norm
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        total = torch.zeros((), device=self.device)
        for number, rows in enumerate(drawn):
            with self._held_back(number + 1 < recipe.accumulate):
                part = self.loss(self.train[rows]) / recipe.accumulate
                part.backward()  # type: ignore[no-untyped-call]
            total += part.detach()
        size = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        return float(_mean_over_processes(total)), float(size)

    def _prepare(self) -> None:
        """Updates softness, the teacher and its share for the next step."""
        recipe, step = self.recipe, self.progress.step
        self._softness.fill_(softness(recipe, step))
        if self._own_teacher.due(step):
            self.teacher = self._own_teacher.make(self.model)
        share = teachers_share(recipe, step)
        self._share.fill_(share)
        if (share > 0.0) != self._asks_teacher:
            # Captured graphs compute the loss in the old way.
            self._asks_teacher = share > 0.0
            self._captured = self._captured_move = None

    def _replayed(self, windows: Tensor) -> Tensor:
        if self._captured is None:
            self._captured = CapturedGradients(
                self.loss, windows, self.model.parameters(), self.recipe.clip
            )
        return self._captured(windows)

    def _move(self) -> None:
        if not self.recipe.capture:
            for optimiser in self.optimisers:
                optimiser.step()
            return
        if self._captured_move is None:
            self._captured_move = CapturedMove(self.optimisers, self.device)
        self._captured_move()

    def _held_back(self, held: bool) -> AbstractContextManager[Any]:
        """Synchronises gradients between processes only with the last micro-batch."""
        if held and isinstance(self._forward, nn.parallel.DistributedDataParallel):
            return self._forward.no_sync()
        return nullcontext()

    def _alarm(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss:.3g}, gradient norm {norm:.3g}"
        usual = self.progress.usual_loss
        if math.isfinite(usual) and loss > usual + self.recipe.spike:
            return f"loss {loss:.3g} after {usual:.3g}"
        return None

    def _skip(self, reason: str) -> None:
        """Skips the step and halves the rate."""
        progress = self.progress
        progress.skipped += 1
        progress.good_steps = 0
        progress.rate_factor *= 0.5
        progress.events.append(
            f"step {progress.step}: {reason}; left out, rate now {progress.rate_factor:g} of plan"
        )

    def _note_good(self, loss: float) -> None:
        progress = self.progress
        known = math.isfinite(progress.usual_loss)
        progress.usual_loss = 0.9 * progress.usual_loss + 0.1 * loss if known else loss
        progress.good_steps += 1
        if progress.rate_factor < 1.0 and progress.good_steps >= self.recipe.recovery:
            progress.rate_factor *= 2.0
            progress.good_steps = 0

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy of every token but the first of each window, with the teacher's."""
        windows = windows.to(self.device).long()
        inputs, targets = windows[:, :-1], windows[:, 1:].flatten()
        with self._precision():
            logits = self._forward(inputs).flatten(0, 1)
        if self.teacher is None or not self._asks_teacher:
            return self._criterion(logits, targets)
        with torch.no_grad(), self._precision():
            wanted = self.teacher(inputs).flatten(0, 1)
        return self._criterion(logits, targets, wanted, self._share, self.recipe.temperature)

    def valid_loss(self) -> float:
        """Mean cross-entropy on the held-out windows, without the teacher."""
        mine = self.valid[_rank() :: _world()]
        self._softness.zero_()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.no_grad(), self._precision():
            # Compiled code is specialised for one batch size.
            step = self.recipe.batch if self.recipe.compile else _EVALUATED_AT_ONCE
            for windows in torch.split(mine.long(), step):
                logits = self.model(windows[:, :-1]).flatten(0, 1).float()
                total += functional.cross_entropy(
                    logits, windows[:, 1:].flatten(), reduction="sum"
                ).double()
        if _world() > 1:
            dist.all_reduce(total)
        return float(total) / (len(self.valid) * (self.valid.shape[1] - 1))

    def _precision(self) -> AbstractContextManager[Any]:
        if self.recipe.precision == "bf16":
            # A cache of rounded weights would outlive its graph.
            cached = not self.recipe.capture
            return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=cached)
        return nullcontext()

    def _evaluate(self, train_loss: float) -> Row:
        progress = self.progress
        codes = self._all_codes()
        flipped = float((codes != self._codes).float().mean()) if len(codes) else 0.0
        self._codes = codes
        row = Row(progress.step, train_loss, self.valid_loss(), flipped)
        progress.rows.append(row)
        # Patience does not count while the weights are still soft.
        progress.stale = 0 if softness(self.recipe, progress.step) else progress.stale + 1
        if row.valid_loss < progress.best_loss:
            progress.best_loss, progress.best_step, progress.stale = row.valid_loss, row.step, 0
            self.best = _copy(self.model)
        return row

    def _all_codes(self) -> Tensor:
        """Every ternary code of the model, in one row; empty for a dense model."""
        parts = [module.ternary()[0].flatten() for module in latents(self.model)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int8)

    def _named_inputs(self) -> dict[str, Any]:
        """Inputs that a resumed run must share, besides shapes and recipe."""
        taught = [] if self.teacher is None else [fingerprint(self.teacher.state_dict().values())]
        return {
            "quantiser": sorted({f"{m.method} of {m.group_size}" for m in latents(self.model)}),
            "training text": fingerprint([self.train]),
            "held-out text": fingerprint([self.valid]),
            "teacher": taught,
            "processes": _world(),
        }

    def save(self, path: str | Path) -> None:
        """Writes a checkpoint atomically."""
        state = {
            "shapes": _shapes(self.model),
            "recipe": asdict(self.recipe),
            "inputs": self._inputs,
            "model": self.model.state_dict(),
            "best": self.best,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "rng": self.rng.get_state(),
            "codes": self._codes,
            "own_teacher": self._own_teacher.state(),
            "progress": asdict(self.progress),
        }
        write_checkpoint(state, path)

    def load(self, path: str | Path) -> None:
        """Resumes from a checkpoint, with the results of an uninterrupted run."""
        mine = {
            "shapes": _shapes(self.model),
            "recipe": asdict(self.recipe),
            "inputs": self._inputs,
        }
        state = read_checkpoint(path, mine)
        self.model.load_state_dict(state["model"])
        self.best = {name: value.to(self.device) for name, value in state["best"].items()}
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        if self.recipe.capture:
            # Loaded rates are in host memory.
            make_rates_tensors(self.optimisers)
        self.rng.set_state(state["rng"])
        self._codes = state["codes"].to(self.device)
        self._own_teacher.restore(state["own_teacher"], self.device)
        self._captured = self._captured_move = None
        rows = [Row(**row) for row in state["progress"].pop("rows")]
        self.progress = Progress(**state["progress"], rows=rows)


def _criterion(
    logits: Tensor,
    targets: Tensor,
    wanted: Tensor | None = None,
    share: Tensor | float = 0.0,
    heat: float = 1.0,
) -> Tensor:
    """Cross-entropy with the text, and by `share` the divergence from a teacher's logits."""
    logits = logits.float()
    loss = functional.cross_entropy(logits, targets)
    if wanted is None:
        return loss
    divergence = functional.kl_div(
        functional.log_softmax(logits / heat, dim=-1),
        functional.log_softmax(wanted.float() / heat, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
    return (1.0 - share) * loss + share * heat**2 * divergence


def _checked(name: str, data: np.ndarray) -> Tensor:
    if data.ndim != 2 or data.shape[1] < 2 or not len(data):
        raise ShapeError(f"{name} must be windows (N, context + 1), got {data.shape}")
    if data.min() < 0:
        raise RangeError(f"{name} holds negative tokens")
    return torch.from_numpy(np.ascontiguousarray(data))


def _shapes(model: nn.Module) -> dict[str, list[int]]:
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _mean_over_processes(value: Tensor) -> Tensor:
    if _world() > 1:
        dist.all_reduce(value)
    return value / _world()


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def check_vocabulary(windows: Sequence[np.ndarray], vocab: int) -> None:
    """Raises RangeError unless every token is below `vocab`."""
    largest = max(int(part.max()) for part in windows)
    if largest >= vocab:
        raise RangeError(f"the text holds token {largest}, outside 0..{vocab - 1}")
