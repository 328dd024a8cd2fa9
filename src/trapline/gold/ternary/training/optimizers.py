"""The recipe of a run, its schedules, and its optimisers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trapline.gold.errors import RangeError
from trapline.gold.ternary.layers import latents
from trapline.gold.ternary.training.model import unit

OPTIMISERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "trapezoid", "constant")
PRECISIONS = ("fp32", "bf16")
#: Fields of a recipe by their minimum, and fields that must be positive.
_LEAST = {
    1: ("steps", "batch", "accumulate", "evaluate_every", "patience", "average", "recovery"),
    0: ("peak_rate", "final_rate", "warm_up", "weight_decay", "latent_decay", "distill", "spike"),
}
_ABOVE_0 = ("matrices", "clip", "temperature", "distill_until")


@dataclass(frozen=True)
class Recipe:
    """How to train. Rates are relative to a row's typical weight, dim^−½."""

    steps: int = 300
    batch: int = 16
    #: Micro-batches whose gradients are added up for one step.
    accumulate: int = 1
    optimiser: str = "adamw"
    peak_rate: float = 0.05
    final_rate: float = 0.005
    #: Learning rate of the matrices between embedding and head, relative to all others.
    matrices: float = 1.0
    warm_up: int = 10
    schedule: str = "cosine"
    clip: float = 1.0
    #: Weight decay of dense matrices.
    weight_decay: float = 0.0
    #: Weight decay of latent ternary weights. It moves them over the quantiser's thresholds: it
    #: hurts with little text and helps, as for dense weights, with plenty.
    latent_decay: float = 0.0
    #: Fraction of the steps during which weights gradually become ternary; 0: at once.
    soft: float = 0.0
    evaluate_every: int = 10
    #: Evaluations without a new best before the run ends; None: never.
    patience: int | None = 8
    seed: int = 0
    precision: str = "fp32"
    compile: bool = False
    #: Whether loss and gradients are one CUDA graph (one GPU, one micro-batch a step).
    capture: bool = False
    #: The teacher's fraction of the loss.
    distill: float = 0.0
    #: Whether that fraction falls to 0, for a student that overtakes its teacher.
    distill_falls: bool = False
    #: Fraction of the steps after which the teacher is no longer used.
    distill_until: float = 1.0
    #: Fraction of the steps after which the run's own dense weights become the teacher.
    own_teacher: float = 0.0
    #: Over how many steps those weights are averaged.
    average: int = 50
    temperature: float = 1.0
    #: A loss this far (in nats) above the moving average is a spike: the step is skipped.
    spike: float = 3.0
    #: Good steps in a row after which a halved rate is doubled again.
    recovery: int = 50

    def __post_init__(self) -> None:
        for name, allowed in (
            ("optimiser", OPTIMISERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                raise RangeError(f"{name} must be one of {', '.join(allowed)}, got {given!r}")
        self._check_finite()
        self._check_bounds()
        if self.capture and self.accumulate > 1:
            raise RangeError("a captured step has one micro-batch")
        self._check_softness_and_teaching()

    def _check_finite(self) -> None:
        for name, value in vars(self).items():
            # An infinite norm disables clipping.
            unlimited = name == "clip" and value == math.inf
            if isinstance(value, float) and not (math.isfinite(value) or unlimited):
                raise RangeError(f"{name} must be finite, got {value}")

    def _check_bounds(self) -> None:
        for least, names in _LEAST.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and value < least:
                    raise RangeError(f"{name} must be at least {least}, got {value}")
        for name in _ABOVE_0:
            if getattr(self, name) <= 0:
                raise RangeError(f"{name} must be above 0, got {getattr(self, name)}")
        if not abs(self.seed) < 1 << 62:
            raise RangeError(f"a seed has at most 62 bits, got {self.seed}")

    def _check_softness_and_teaching(self) -> None:
        if not 0.0 <= self.soft < 1.0:
            raise RangeError("soft lies between 0 and 1: the model must be ternary in the end")
        if max(self.distill, self.distill_until) > 1.0:
            raise RangeError("distill and distill_until are shares: 1 at most")
        if self.own_teacher and not 0.0 < self.own_teacher < min(self.soft, self.distill_until):
            raise RangeError("a run's own teacher comes before its weights have hardened")


def rate(recipe: Recipe, step: int) -> float:
    """The learning rate: linear warm-up, then the schedule."""
    warm = min(1.0, step / max(1, recipe.warm_up))
    gone = min(1.0, step / recipe.steps)
    left = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * gone)),
        "linear": 1.0 - gone,
        "trapezoid": min(1.0, 2.0 * (1.0 - gone)),
        "constant": 1.0,
    }[recipe.schedule]
    return warm * (recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * left)


def softness(recipe: Recipe, step: int) -> float:
    """The share of the latent weights in the forward pass at this step."""
    if not recipe.soft:
        return 0.0
    begin, end = recipe.own_teacher * recipe.steps, recipe.soft * recipe.steps
    return min(1.0, max(0.0, (end - step) / (end - begin)))


def handed_over(recipe: Recipe, step: int) -> bool:
    """Whether the run's own teacher exists at this step."""
    return step >= recipe.own_teacher * recipe.steps


def teachers_share(recipe: Recipe, step: int) -> float:
    """The teacher's share of the loss at this step."""
    if not handed_over(recipe, step):
        return 0.0
    if not recipe.distill_falls:
        return recipe.distill if step < recipe.distill_until * recipe.steps else 0.0
    begin, end = recipe.own_teacher * recipe.steps, recipe.distill_until * recipe.steps
    return recipe.distill * max(0.0, (end - step) / (end - begin))


def make_optimisers(model: nn.Module, recipe: Recipe) -> list[Any]:
    """AdamW for everything, or Muon for the matrices between embedding and head."""
    latent = {id(module.weight) for module in latents(model)}
    tied = bool(getattr(model, "tied", False))
    # Parameters with equal settings share a group, which an optimiser updates at once.
    adam: dict[tuple[float, float], list[nn.Parameter]] = {}
    muon: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = 0.0
        # Decay would shrink an untied embedding: most of its rows do not occur in a batch.
        if parameter.ndim > 1 and (tied or "embedding" not in name):
            decay = recipe.latent_decay if id(parameter) in latent else recipe.weight_decay
        inner = parameter.ndim == 2 and "embedding" not in name and "head" not in name
        groups = muon if recipe.optimiser == "muon" and inner else adam
        size = unit(name, parameter, tied=tied) * (recipe.matrices if inner else 1.0)
        groups.setdefault((size, decay), []).append(parameter)
    made: list[Any] = []
    if adam:
        on_gpu = all(parameter.is_cuda for parameter in model.parameters())
        kernel = {"fused": True, "capturable": recipe.capture} if on_gpu else {}
        made.append(torch.optim.AdamW(_grouped(adam), lr=0.0, betas=(0.9, 0.98), **kernel))
    if muon:
        made.append(Muon(_grouped(muon)))
    if recipe.capture:
        make_rates_tensors(made)
    return made


def make_rates_tensors(optimisers: list[Any]) -> None:
    """Replaces rates by tensors, which can change between replays of a CUDA graph."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            device = group["params"][0].device
            group["lr"] = torch.zeros((), dtype=torch.float32, device=device)


def set_rates(optimisers: list[Any], relative: float) -> None:
    """Gives every group its rate: `relative` to the typical weight of its parameters."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["unit"] * relative)
            else:
                group["lr"] = group["unit"] * relative


class Muon(torch.optim.Optimizer):
    """Steps in the direction of the orthogonal matrix nearest to the momentum.

    Equals `torch.optim.Muon` with updates scaled to AdamW's typical size, but batches matrices of
    one shape: fifty small matrices one by one take two thousand launches per step.
    """

    MOMENTUM = 0.95

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for alike in _by_shape(group["params"]):
                self._move(alike, group["lr"], group["weight_decay"])

    def _move(self, alike: list[Tensor], lr: float | Tensor, decay: float) -> None:
        gradients = torch.stack([p.grad for p in alike if p.grad is not None])
        state = self.state[alike[0]]
        if not state:
            state["momentum"] = torch.zeros_like(gradients)
        average = state["momentum"].lerp_(gradients, 1.0 - self.MOMENTUM)
        ahead = orthogonal(gradients.lerp_(average, self.MOMENTUM)).to(alike[0].dtype)
        if decay:
            torch._foreach_mul_(alike, 1.0 - lr * decay)
        size = 0.2 * max(alike[0].shape) ** 0.5
        torch._foreach_add_(alike, list((ahead * (-lr * size)).unbind()))


def orthogonal(matrices: Tensor) -> Tensor:
    """(N, rows, columns), each with its singular values moved close to 1 (Newton–Schulz)."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.mT if tall else matrices
    x = x.bfloat16() if x.is_cuda else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def _by_shape(parameters: list[Tensor]) -> list[list[Tensor]]:
    found: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(tuple(parameter.shape), []).append(parameter)
    return list(found.values())


def _grouped(groups: dict[tuple[float, float], list[nn.Parameter]]) -> list[dict[str, Any]]:
    return [
        {"params": parameters, "unit": size, "weight_decay": decay}
        for (size, decay), parameters in groups.items()
    ]
