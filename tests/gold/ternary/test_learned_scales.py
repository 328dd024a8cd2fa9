"""Learned scales: what is stored is what was trained, and the gradient is that of a product."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from trapline.gold.decoder.api import Decoder
from trapline.gold.ternary.layers import (
    TernaryLinear,
    assert_all_ternary,
    convert,
    coverage,
    dequantize,
    dequantized,
    learn_scales,
    soften,
    ternarize,
)
from trapline.gold.ternary.packed_model import pack_model
from trapline.gold.ternary.training.model import DecoderLM, Shape, decoder_config, initialise
from trapline.gold.ternary.training.trainer import Recipe, Trainer

SHAPE = Shape(vocab=12, dim=160, layers=1, heads=2, context=11)
WINDOWS = (np.arange(24)[:, None] % 12 + 5 * np.arange(12)[None, :]) % 12
RECIPE = Recipe(steps=8, batch=4, evaluate_every=4, warm_up=2, peak_rate=0.2, optimiser="muon")


@pytest.fixture
def layer():
    torch.manual_seed(0)
    made = TernaryLinear(300, 5)
    learn_scales(made)
    with torch.no_grad():
        made.gain.copy_(torch.rand(15) + 0.5)
    return made


def model(tied=True):
    decoder = Decoder(decoder_config(SHAPE, tied=tied))
    initialise(decoder, 0)
    convert(decoder)
    learn_scales(decoder)
    return DecoderLM(decoder)


def test_gains_of_one_change_nothing():
    plain = TernaryLinear(300, 5)
    before = plain.ternary_weight().detach()
    learn_scales(plain)
    assert torch.equal(plain.ternary_weight(), before)


def test_forward_weight_equals_the_stored_weight(layer):
    codes, scales = layer.ternary()
    assert scales.dtype == torch.float16
    assert not torch.equal(scales, ternarize(layer.weight)[1])
    stored = dequantize(codes, scales)
    assert torch.equal(layer.ternary_weight(), stored)
    soften(layer, torch.zeros(()))
    assert torch.equal(layer.forward_weight(), stored)
    soften(layer, torch.ones(()))
    assert torch.equal(layer.forward_weight(), layer.weight)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_latents_and_gains(layer, compiled):
    factor = torch.randn(5, 300)
    weight = torch.compile(layer.ternary_weight, backend="aot_eager") if compiled else None
    ((weight or layer.ternary_weight)() * factor).sum().backward()
    assert torch.equal(layer.weight.grad, factor)
    codes, scales = ternarize(layer.weight)
    groups = nn.functional.pad(factor * codes, (0, 84)).reshape(5, 3, 128).sum(-1)
    torch.testing.assert_close(layer.gain.grad, (groups * scales.float()).flatten())


def test_scales_stay_finite(layer):
    with torch.no_grad():
        layer.weight.mul_(1e6)
        layer.gain.fill_(1e9)
    assert layer.ternary()[1].isfinite().all()


def test_group_of_scale_0_has_no_codes(layer):
    with torch.no_grad():
        layer.gain[4] = 1e-9
    codes, scales = layer.ternary()
    assert codes.dtype == torch.int8
    assert scales[1, 1] == 0
    assert not codes[1, 128:256].any()
    assert codes[1, :128].any()
    assert torch.equal(layer.ternary_weight(), dequantize(codes, scales))


@pytest.mark.parametrize("tied", [False, True])
def test_all_matrices_are_ternary_and_tied_tables_share_gains(tied):
    made = model(tied)
    assert_all_ternary(made)
    dense = [share.name for share in coverage(made) if not share.ternary]
    assert all("norm" in name for name in dense)
    names = dict(made.named_parameters())
    assert ("decoder.head.gain" in names) != tied


def test_packed_weights_equal_trained_weights():
    trainer = Trainer(model(), replace(RECIPE, soft=0.5), WINDOWS, WINDOWS)
    best = trainer.run()
    gains = [p for name, p in best.named_parameters() if name.endswith("gain")]
    assert all(not torch.equal(gain, torch.ones_like(gain)) for gain in gains)
    tokens = torch.arange(8)[None]
    wanted = best(tokens)
    plain = DecoderLM(dequantized(best.decoder))
    assert torch.equal(plain(tokens), wanted)
    stored = {n: m.ternary()[1] for n, m in best.named_modules() if hasattr(m, "ternary")}
    packed = pack_model(best)
    for name, scales in stored.items():
        assert torch.equal(packed.get_submodule(name).scales, scales)


def test_resumed_run_is_exact(tmp_path):
    whole, first, second = (Trainer(model(), RECIPE, WINDOWS, WINDOWS) for _ in range(3))
    wanted = whole.run().state_dict()
    first.run(stop_at=5)
    first.save(tmp_path / "last.pt")
    second.load(tmp_path / "last.pt")
    got = second.run().state_dict()
    assert second.progress == whole.progress
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
