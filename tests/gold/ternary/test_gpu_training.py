"""Training on a GPU: a captured step is the plain one. Skips where there is no GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.ternary.layers import convert, ternarize
from trapline.gold.ternary.training.model import DecoderLM, Shape, decoder_config, initialise
from trapline.gold.ternary.training.trainer import Recipe, Trainer

pytestmark = pytest.mark.needs_gpu
PLAIN = Recipe(
    steps=24, batch=8, evaluate_every=8, warm_up=2, peak_rate=0.1, soft=0.5, optimiser="muon"
)
OWN_TEACHER = {"own_teacher": 0.25, "distill": 0.5, "distill_until": 0.4, "average": 4}
WINDOWS = (np.arange(64)[:, None] % 12 + 5 * np.arange(17)[None, :]) % 12


def trainer(recipe):
    decoder = Decoder(decoder_config(Shape(vocab=12, dim=128, layers=2, heads=2, context=16)))
    initialise(decoder, 0)
    convert(decoder)
    return Trainer(DecoderLM(decoder), recipe, WINDOWS, WINDOWS[:16], device="cuda")


@pytest.mark.parametrize(
    "how",
    [
        {"capture": True},
        {"compile": True, "capture": True},
        {"capture": True, **OWN_TEACHER},
        {"compile": True, "capture": True, **OWN_TEACHER},
    ],
)
def test_captured_steps_train_like_plain_steps(how):
    plain, other = trainer(PLAIN), trainer(replace(PLAIN, **how))
    for run in (plain, other):
        run.run()
    assert min(row.flipped for row in other.progress.rows) > 0.0
    assert max(run.progress.rows[-1].valid_loss for run in (plain, other)) < 0.1


@pytest.mark.parametrize("compiled", [False, True])
def test_scales_are_rounded_once(compiled):
    """Beside a tie by less than float32 sees: as NumPy rounds them."""
    ties = 1 + (2 * torch.arange(64, dtype=torch.float64) + 1) * 2.0**-11
    near = torch.cat([ties * (1 + off * 2.0**-40) for off in (-1, 0, 1)])[:, None]
    made = torch.compile(ternarize) if compiled else ternarize
    wanted = near.numpy().astype(np.float16)
    assert np.array_equal(made(near.cuda())[1].cpu().numpy(), wanted)


def test_captured_run_resumes_from_a_checkpoint(tmp_path):
    recipe = replace(PLAIN, capture=True)
    first, second = trainer(recipe), trainer(recipe)
    first.run(stop_at=12)
    first.save(tmp_path / "last.pt")
    second.load(tmp_path / "last.pt")
    second.run()
    assert second.progress.rows[-1].valid_loss < 0.1
