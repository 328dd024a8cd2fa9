"""A run that becomes its own teacher: dense at first, then a ternary student of what it was.

Up to `Recipe.own_teacher` of the steps the weights are wholly soft, and averaged. Then the average
is frozen as teacher, and the run goes on from where it is: same weights, same optimisers, same plan
of rates, while the weights harden.
"""

import copy

import torch
from torch import Tensor, nn

from trapline.gold.ternary.layers import soften
from trapline.gold.ternary.training.optimizers import Recipe, handed_over


class OwnTeacher:
    """The average of a run's weights, and from the hand-over on the teacher made of it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._average: list[Tensor] = []
        self.model: nn.Module | None = None

    @torch.no_grad()
    def note(self, model: nn.Module, step: int) -> None:
        """After `step` steps: takes the weights into the average, until it has become teacher."""
        if not self._recipe.own_teacher or self.model is not None:
            return
        weights = [parameter.detach() for parameter in model.parameters()]
        if not self._average:
            self._average = [weight.clone() for weight in weights]
        # A plain mean first: the start must not weigh more than any other step.
        torch._foreach_lerp_(self._average, weights, 1.0 / min(step, self._recipe.average))

    def due(self, step: int) -> bool:
        """Whether the teacher has to be made before the next step."""
        return bool(self._average) and self.model is None and handed_over(self._recipe, step)

    def make(self, model: nn.Module) -> nn.Module:
        """A frozen copy of the model with the averaged weights, as they are: wholly soft."""
        teacher = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            torch._foreach_copy_(list(teacher.parameters()), self._average)
        soften(teacher, torch.ones((), device=self._average[0].device))
        self.model, self._average = teacher, []
        return teacher

    def state(self) -> list[Tensor]:
        """What a checkpoint needs: the average so far, or what became of it."""
        made = [] if self.model is None else [p.detach() for p in self.model.parameters()]
        return made or self._average

    def restore(self, state: list[Tensor], device: torch.device) -> None:
        """Goes on from a checkpoint. A teacher that was there is due again, and made as it was."""
        self._average = [weight.to(device) for weight in state]
        self.model = None
