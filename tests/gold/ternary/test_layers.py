"""The torch modules: straight-through gradients, shared tables, conversion, coverage."""

import numpy as np
import pytest
import torch
from torch import nn

from trapline.gold import TernaryLinear
from trapline.gold.errors import RangeError
from trapline.gold.ternary import oracle
from trapline.gold.ternary.layers import (
    TernaryEmbedding,
    TiedHead,
    assert_all_ternary,
    convert,
    coverage,
    straight_through,
    ternarize,
)


class Tiny(nn.Module):
    """Embedding, a norm, a projection and a head, tied or not."""

    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 300)
        self.norm = nn.LayerNorm(300)
        self.body = nn.Sequential(nn.Linear(300, 300, bias=bias), nn.ReLU())
        self.head = nn.Linear(300, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.embedding(tokens))))


def test_forward_uses_the_stored_weight() -> None:
    layer = TernaryLinear(300, 5)
    x = torch.randn(7, 300)
    codes, scales = layer.ternary()
    dense = torch.from_numpy(oracle.dequantize(codes.numpy(), scales.numpy()))
    assert torch.equal(layer(x), nn.functional.linear(x, dense))


def test_straight_through_gradient() -> None:
    latent = torch.randn(5, 300, requires_grad=True)
    factor = torch.randn(5, 300)
    (straight_through(latent) * factor).sum().backward()
    assert latent.grad is not None
    assert torch.equal(latent.grad, factor)


def test_compiled_gradient_and_value() -> None:
    """The graph is traced and differentiated as for a GPU, without generating code for it."""
    latent = torch.randn(5, 300, requires_grad=True)
    factor = torch.randn(5, 300)
    found = torch.compile(straight_through, backend="aot_eager")(latent)
    assert torch.equal(found, straight_through(latent))
    (found * factor).sum().backward()
    assert torch.equal(latent.grad, factor)


def test_training_moves_the_codes() -> None:
    torch.manual_seed(0)
    layer, target = TernaryLinear(32, 8), torch.randn(64, 8)
    x, before = torch.randn(64, 32), layer.ternary()[0].clone()
    losses = []
    for _ in range(60):
        loss = ((layer(x) - target) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, [layer.weight])
        with torch.no_grad():
            layer.weight -= gradient
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(layer.ternary()[0], before)


def test_tied_head_uses_the_embedding() -> None:
    embedding = TernaryEmbedding(11, 300)
    head = TiedHead(embedding)
    x = torch.randn(2, 300)
    assert torch.equal(head(x), nn.functional.linear(x, embedding(torch.arange(11))))
    assert len(list(head.parameters())) == 1


def test_conversion_covers_everything_but_norms() -> None:
    model = Tiny()
    expected = {
        name: oracle.dequantize(*oracle.ternarize(p.detach().numpy()))
        for name, p in model.named_parameters()
        if p.ndim > 1
    }
    with pytest.raises(RangeError, match=r"embedding\.weight"):
        assert_all_ternary(model)
    shares = convert(model)
    assert_all_ternary(model)
    assert {s.name for s in shares if not s.ternary} == {"norm.weight", "norm.bias"}
    assert sum(s.share for s in shares) == pytest.approx(1.0)
    for name, want in expected.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert np.array_equal(layer.ternary_weight().detach().numpy(), want)
    assert model(torch.arange(4)).shape == (4, 11)


def test_conversion_keeps_a_shared_weight_shared() -> None:
    model = Tiny(tied=True)
    convert(model)
    assert model.head.weight is model.embedding.weight
    assert len([s for s in coverage(model) if s.ternary]) == 2


def test_conversion_without_dense_weights_raises() -> None:
    with pytest.raises(RangeError, match="no dense weights to make ternary"):
        convert(nn.Sequential(nn.LayerNorm(4), nn.ReLU()))


def test_conversion_of_a_bias_raises() -> None:
    with pytest.raises(RangeError, match="bias"):
        convert(Tiny(bias=True))


def test_scales_are_rounded_once(monkeypatch) -> None:
    """Also where torch converts by way of float32: on x86 and by CUDA's own kernels."""
    half = torch.Tensor.half
    monkeypatch.setattr(torch.Tensor, "half", lambda x: half(x.float()))
    odd = 2 * torch.arange(64, dtype=torch.float64) + 1
    ties = torch.cat([1 + odd * 2.0**-11, 2.0**15 + odd * 2.0**4, odd * 2.0**-25])
    # Beside a tie by less than float32 sees; the last ties are of subnormal numbers.
    near = torch.cat([ties * (1 + off * 2.0**-40) for off in (-1, 0, 1)])[:, None]
    _, scales = oracle.ternarize(near.numpy())
    assert np.array_equal(ternarize(near)[1].numpy(), scales)
