"""Self-distillation: a run trains dense weights first, then a ternary student of their average.

For the fraction `Recipe.own_teacher` of the steps the weights are soft and averaged. Then the
average is frozen as the teacher, and the run continues with the same weights, optimisers and
schedule while the weights harden.
"""

import copy

import torch
from torch import Tensor, nn

from trapline.gold.ternary.layers import soften
from trapline.gold.ternary.training.optimizers import Recipe, handed_over


class OwnTeacher:
    """The average of a run's weights, and later the teacher made from it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._average: list[Tensor] = []
        self.model: nn.Module | None = None

    @torch.no_grad()
    def note(self, model: nn.Module, step: int) -> None:
        """Adds the weights after `step` steps to the average, until the teacher exists."""
        if not self._recipe.own_teacher or self.model is not None:
            return
        weights = [parameter.detach() for parameter in model.parameters()]
        if not self._average:
            self._average = [weight.clone() for weight in weights]
        # A plain mean first, so that the start has no extra weight.
        torch._foreach_lerp_(self._average, weights, 1.0 / min(step, self._recipe.average))

    def due(self, step: int) -> bool:
        """Whether the teacher must be created before the next step."""
        return bool(self._average) and self.model is None and handed_over(self._recipe, step)

    def make(self, model: nn.Module) -> nn.Module:
        """A frozen dense copy of the model with the averaged weights."""
        teacher = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            torch._foreach_copy_(list(teacher.parameters()), self._average)
        soften(teacher, torch.ones((), device=self._average[0].device))
        self.model, self._average = teacher, []
        return teacher

    def state(self) -> list[Tensor]:
        """The average so far, or the teacher's weights, for a checkpoint."""
        made = [] if self.model is None else [p.detach() for p in self.model.parameters()]
        return made or self._average

    def restore(self, state: list[Tensor], device: torch.device) -> None:
        """Restores a checkpoint; a teacher that existed is created again before the next step."""
        self._average = [weight.to(device) for weight in state]
        self.model = None
