"""A run that becomes its own teacher: nothing breaks at the hand-over."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.errors import RangeError
from trapline.gold.ternary.layers import convert, latents
from trapline.gold.ternary.training.model import DecoderLM, Shape, decoder_config, initialise
from trapline.gold.ternary.training.optimizers import softness, teachers_share
from trapline.gold.ternary.training.trainer import Recipe, Trainer

SHAPE = Shape(vocab=12, dim=16, layers=1, heads=2, context=11)
WINDOWS = (np.arange(24)[:, None] % 12 + 5 * np.arange(12)[None, :]) % 12
RECIPE = Recipe(
    steps=20, batch=4, evaluate_every=5, warm_up=2, peak_rate=0.2, optimiser="muon",
    own_teacher=0.5, soft=0.8, distill=0.5, distill_falls=True, distill_until=0.7, average=4,
)  # fmt: skip


def trainer(recipe, *, dense=False, teacher=None):
    decoder = Decoder(decoder_config(SHAPE))
    initialise(decoder, 0)
    if not dense:
        convert(decoder)
    return Trainer(DecoderLM(decoder), recipe, WINDOWS, WINDOWS, teacher=teacher)


def weights(run):
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_first_phase_equals_a_dense_run():
    plain = replace(RECIPE, own_teacher=0.0, soft=0.0, distill=0.0)
    mine, dense = trainer(RECIPE), trainer(plain, dense=True)
    for run in (mine, dense):
        run.run(stop_at=10)
    assert same(weights(mine), weights(dense))


def test_soft_run_without_distillation_equals_a_dense_run(monkeypatch):
    plain = replace(RECIPE, own_teacher=0.0, soft=0.0, distill=0.0)
    mine, dense = trainer(replace(RECIPE, distill=0.0)), trainer(plain, dense=True)
    monkeypatch.setattr("trapline.gold.ternary.training.trainer.softness", lambda recipe, step: 1.0)
    for run in (mine, dense):
        run.run()
    assert mine.teacher is not None
    assert same(weights(mine), weights(dense))


def test_teacher_is_the_frozen_average():
    run = trainer(RECIPE)
    seen = []
    for step in range(1, 11):
        run.run(stop_at=step)
        seen.append(weights(run))
    expected = seen[0]
    for step, now in enumerate(seen[1:], start=2):
        expected = [
            torch.lerp(a, w, 1.0 / min(step, 4)) for a, w in zip(expected, now, strict=True)
        ]
    assert run.teacher is None
    run.run(stop_at=11)
    held = list(run.teacher.parameters())
    assert not any(parameter.requires_grad for parameter in held)
    for wanted, parameter in zip(expected, held, strict=True):
        torch.testing.assert_close(parameter, wanted)
    first = [parameter.clone() for parameter in held]
    run.run()
    assert same(first, held)
    # It answers with its latent weights as they are.
    for module in latents(run.teacher):
        assert torch.equal(module.forward_weight(), module.weight)


def test_distillation_changes_the_weights():
    mine, silent = trainer(RECIPE), trainer(replace(RECIPE, distill=0.0))
    for run in (mine, silent):
        run.run(stop_at=12)
    assert not same(weights(mine), weights(silent))


@pytest.mark.parametrize("stop", [7, 10, 12, 17])
def test_resumed_run_is_exact(tmp_path, stop):
    """In the dense part, at the hand-over, with the teacher, and after it was last asked."""
    whole = trainer(RECIPE)
    whole.run()
    first = trainer(RECIPE)
    first.run(stop_at=stop)
    first.save(tmp_path / "last.pt")
    second = trainer(RECIPE)
    second.load(tmp_path / "last.pt")
    second.run()
    assert same(weights(whole), weights(second))
    assert whole.progress == second.progress


def test_schedules_of_softness_and_distillation():
    steps = range(0, 21, 2)
    assert [round(softness(RECIPE, s), 3) for s in steps] == [
        1, 1, 1, 1, 1, 1, 0.667, 0.333, 0, 0, 0
    ]  # fmt: skip
    assert [round(teachers_share(RECIPE, s), 3) for s in steps] == [
        0, 0, 0, 0, 0, 0.5, 0.25, 0, 0, 0, 0
    ]  # fmt: skip
    given = replace(RECIPE, own_teacher=0.0, distill_until=1.0)
    assert teachers_share(given, 0) == 0.5
    assert teachers_share(given, 10) == 0.25
    assert teachers_share(replace(given, distill_falls=False), 19) == 0.5


def test_invalid_recipes_raise():
    for change in (
        {"own_teacher": 0.8},
        {"own_teacher": 0.7},
        {"own_teacher": -0.1},
        {"average": 0},
    ):
        with pytest.raises(RangeError):
            replace(RECIPE, **change)
    given = trainer(replace(RECIPE, own_teacher=0.0, distill=0.0), dense=True).model
    with pytest.raises(RangeError, match="one teacher"):
        trainer(RECIPE, teacher=given)
