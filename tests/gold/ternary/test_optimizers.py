"""The batched Muon against torch's own, matrix by matrix."""

import pytest
import torch

from trapline.gold.ternary.training.optimizers import SCHEDULES, Muon, Recipe, orthogonal, rate

SHAPES = ((8, 8), (12, 8), (8, 12), (8, 8))


def test_batched_muon_matches_torch():
    source = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=source) for shape in SHAPES]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    mine = Muon([{"params": ours, "weight_decay": 0.1}])
    mine.param_groups[0]["lr"] = 0.05
    other = torch.optim.Muon(theirs, lr=0.05, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for left, right in zip(ours, theirs, strict=True):
            left.grad = torch.randn(left.shape, generator=source)
            right.grad = left.grad.clone()
        mine.step()
        other.step()
    for before, left, right in zip(start, ours, theirs, strict=True):
        moved = (right - before).norm()
        # torch's iteration runs in bfloat16.
        assert (left - right).norm() < 0.03 * moved


@pytest.mark.parametrize("shape", [(2, 6, 6), (1, 5, 9), (3, 9, 5)])
def test_singular_values_are_near_one(shape):
    found = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.2
    assert values.max() < 1.4


def test_zero_gradient_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.zeros(4, 4)
    optimiser = Muon([{"params": [weight], "weight_decay": 0.0}])
    optimiser.param_groups[0]["lr"] = 0.1
    optimiser.step()
    assert torch.equal(weight.detach(), torch.ones(4, 4))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_rise_then_fall(schedule):
    recipe = Recipe(steps=100, warm_up=10, peak_rate=0.2, final_rate=0.02, schedule=schedule)
    found = [rate(recipe, step) for step in range(101)]
    assert found[0] == 0.0
    assert found[:11] == sorted(found[:11])
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[100] == pytest.approx(0.2 if schedule == "constant" else 0.02)


def test_trapezoid_holds_its_rate_for_half_of_the_steps():
    recipe = Recipe(steps=100, warm_up=10, peak_rate=0.2, final_rate=0.0, schedule="trapezoid")
    assert [rate(recipe, step) for step in (10, 50, 75)] == pytest.approx([0.2, 0.2, 0.1])
