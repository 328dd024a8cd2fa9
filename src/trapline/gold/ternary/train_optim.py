"""How a run steps: the recipe, its schedule, and which optimiser moves which weight."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trapline.gold.errors import RangeError
from trapline.gold.ternary.linear import latents
from trapline.gold.ternary.train_model import unit

OPTIMISERS = ("adamw", "muon")
SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("fp32", "bf16")


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
    warm_up: int = 10
    schedule: str = "cosine"
    clip: float = 1.0
    #: Of dense matrices. Latent ternary weights do not decay: it would drag them over the
    #: quantiser's thresholds without any reason in the data.
    weight_decay: float = 0.0
    #: Of latent weights, to see what it does; 0 in every serious run.
    latent_decay: float = 0.0
    evaluate_every: int = 10
    #: Evaluations without a new best before the run ends; None: never.
    patience: int | None = 8
    seed: int = 0
    precision: str = "fp32"
    compile: bool = False
    #: The teacher's share of the loss, and the temperature of both sides.
    distill: float = 0.0
    temperature: float = 1.0
    #: A loss this far (in nats) above the usual one is a spike: the step is left out.
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
        if min(self.steps, self.batch, self.accumulate, self.evaluate_every) < 1:
            raise RangeError("steps, batch, accumulate and evaluate_every must be at least 1")
        if not (0.0 <= self.distill <= 1.0 and self.temperature > 0.0):
            raise RangeError("distill lies between 0 and 1, temperature above 0")


def rate(recipe: Recipe, step: int) -> float:
    """A straight warm-up, then down as scheduled."""
    warm = min(1.0, step / max(1, recipe.warm_up))
    gone = min(1.0, step / recipe.steps)
    left = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * gone)),
        "linear": 1.0 - gone,
        "constant": 1.0,
    }[recipe.schedule]
    return warm * (recipe.final_rate + (recipe.peak_rate - recipe.final_rate) * left)


def make_optimisers(model: nn.Module, recipe: Recipe) -> list[Any]:
    """AdamW for everything, or Muon for the matrices between embedding and head."""
    latent = {id(module.weight) for module in latents(model)}
    tied = bool(getattr(model, "tied", False))
    # Parameters that move alike share a group: an optimiser steps through a group at once.
    adam: dict[tuple[float, float], list[nn.Parameter]] = {}
    muon: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = 0.0
        if parameter.ndim > 1:
            decay = recipe.latent_decay if id(parameter) in latent else recipe.weight_decay
        inner = parameter.ndim == 2 and "embedding" not in name and "head" not in name
        groups = muon if recipe.optimiser == "muon" and inner else adam
        groups.setdefault((unit(name, parameter, tied=tied), decay), []).append(parameter)
    made: list[Any] = []
    if adam:
        made.append(torch.optim.AdamW(_grouped(adam), lr=0.0, betas=(0.9, 0.98)))
    if muon:
        # Updates scaled to AdamW's typical size, so that one rate serves both.
        made.append(torch.optim.Muon(_grouped(muon), lr=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def _grouped(groups: dict[tuple[float, float], list[nn.Parameter]]) -> list[dict[str, Any]]:
    return [
        {"params": parameters, "unit": size, "weight_decay": decay}
        for (size, decay), parameters in groups.items()
    ]
