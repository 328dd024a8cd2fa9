"""Training on a GPU: a captured step is the plain one. Skips where there is no GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trapline.gold.decoder.model import Decoder
from trapline.gold.ternary.linear import convert
from trapline.gold.ternary.train import Recipe, Trainer
from trapline.gold.ternary.train_model import DecoderLM, Shape, decoder_config, initialise

pytestmark = [
    pytest.mark.needs_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLAIN = Recipe(
    steps=24, batch=8, evaluate_every=8, warm_up=2, peak_rate=0.1, soft=0.5, optimiser="muon"
)


OWN_TEACHER = {"own_teacher": 0.25, "distill": 0.5, "distill_until": 0.4, "average": 4}


@pytest.mark.parametrize(
    "how",
    [
        {"capture": True},
        {"compile": True, "capture": True},
        {"capture": True, **OWN_TEACHER},
        {"compile": True, "capture": True, **OWN_TEACHER},
    ],
)
def test_a_captured_step_trains_as_a_plain_one(how):
    windows = (np.arange(64)[:, None] % 12 + 5 * np.arange(17)[None, :]) % 12

    def trained(recipe):
        decoder = Decoder(decoder_config(Shape(vocab=12, dim=128, layers=2, heads=2, context=16)))
        initialise(decoder, 0)
        convert(decoder)
        trainer = Trainer(DecoderLM(decoder), recipe, windows, windows[:16], device="cuda")
        trainer.run()
        return trainer.progress.rows

    plain, other = trained(PLAIN), trained(replace(PLAIN, **how))
    assert min(row.flipped for row in other) > 0.0
    assert max(plain[-1].valid_loss, other[-1].valid_loss) < 0.1
