"""The trainer: learns, covers every tensor, resumes exactly, stops before it collapses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.ternary import small_lm
from trapline.gold.ternary.layers import assert_all_ternary
from trapline.gold.ternary.training.trainer import (
    Recipe,
    Shape,
    TernaryLM,
    Trainer,
    check_vocabulary,
)

SHAPE = Shape(vocab=12, dim=16, layers=1, heads=2, context=11)
RECIPE = Recipe(steps=60, batch=8, evaluate_every=5, warm_up=4)
CONFIG = {"vocab": 12, "dim": 16, "layers": 1, "heads": 2}


def ruled(count: int) -> np.ndarray:
    """Each token is the one before plus 5, modulo 12."""
    starts = np.arange(count)[:, None] % 12
    return (starts + 5 * np.arange(12)[None, :]) % 12


def noise(count: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 12, (count, 12))


def small(shape: Shape = SHAPE) -> TernaryLM:
    torch.manual_seed(0)
    return TernaryLM(shape)


def test_all_ternary_model_learns_a_rule() -> None:
    trainer = Trainer(small(), RECIPE, ruled(24), ruled(12))
    model = trainer.run()
    assert_all_ternary(model)
    first, last = trainer.progress.rows[0], trainer.progress.rows[-1]
    assert trainer.progress.best_loss < np.log(12) / 2
    assert last.perplexity < first.perplexity
    assert 0.0 < max(row.flipped for row in trainer.progress.rows) < 1.0


def test_oracle_reproduces_the_trained_logits() -> None:
    """Codes and scales, through the float64 oracle, give the logits of the torch model."""
    model = small()
    weights = small_lm.dense(model.ternaries())
    assert weights.keys() == small_lm.tensor_shapes(CONFIG).keys()
    document = noise(1)[0]
    with torch.no_grad():
        got = model(torch.from_numpy(document)[None])[0].numpy()
    assert np.allclose(got, small_lm.logits(weights, document, CONFIG), atol=1e-4)


def test_resumed_run_is_exact(tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=20)
    whole = Trainer(small(), recipe, ruled(24), noise(6))
    expected = whole.run().state_dict()
    broken_off = Trainer(small(), recipe, ruled(24), noise(6))
    broken_off.run(stop_at=7)
    broken_off.save(tmp_path / "run.pt")
    resumed = Trainer(small(), recipe, ruled(24), noise(6))
    resumed.load(tmp_path / "run.pt")
    got = resumed.run().state_dict()
    assert resumed.progress == whole.progress
    for name, value in expected.items():
        assert torch.equal(value, got[name])


def test_early_stopping_prevents_overfitting() -> None:
    train, valid = noise(12), noise(24, seed=4)
    recipe = replace(RECIPE, steps=120, patience=4, peak_rate=0.1)
    stopped = Trainer(small(), recipe, train, valid)
    stopped.run()
    assert stopped.progress.step < 120
    assert np.exp(stopped.progress.best_loss) < 1.2 * 12
    driven = Trainer(small(), replace(recipe, patience=None), train, valid)
    driven.run()
    assert driven.progress.step == 120
    assert driven.progress.rows[-1].train_loss < np.log(12) - 0.5
    assert driven.progress.rows[-1].perplexity > 2 * 12


def test_loss_spikes_are_skipped_and_halve_the_rate() -> None:
    trainer = Trainer(small(), replace(RECIPE, steps=2), ruled(24), ruled(12))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.loss = lambda windows: trainer.model(windows[:, :-1]).sum() * float("nan")  # type: ignore[method-assign]
    trainer.run()
    assert trainer.progress.skipped == 2
    assert trainer.progress.rate_factor == 0.25
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_failed_save_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(small(), RECIPE, ruled(24), ruled(12))
    path = tmp_path / "run.pt"
    trainer.save(path)
    good = path.read_bytes()

    def full_disk(state: object, place: Path) -> None:
        place.write_bytes(b"half a")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(path)
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]


def test_invalid_arguments_raise(tmp_path: Path) -> None:
    with pytest.raises(RangeError, match="heads"):
        Shape(vocab=12, dim=10, layers=1, heads=3, context=4)
    with pytest.raises(ShapeError, match="train must be"):
        Trainer(small(), RECIPE, ruled(24)[:, :1], ruled(12))
    with pytest.raises(ShapeError, match="valid must be"):
        Trainer(small(), RECIPE, ruled(24), ruled(12)[:0])
    with pytest.raises(RangeError, match="negative"):
        Trainer(small(), RECIPE, ruled(24) - 12, ruled(12))
    with pytest.raises(RangeError, match="outside"):
        check_vocabulary([ruled(24), ruled(12) + 1], 12)
    other = Trainer(small(replace(SHAPE, layers=2)), RECIPE, ruled(24), ruled(12))
    other.save(tmp_path / "other.pt")
    with pytest.raises(ShapeError, match="other shapes"):
        Trainer(small(), RECIPE, ruled(24), ruled(12)).load(tmp_path / "other.pt")
