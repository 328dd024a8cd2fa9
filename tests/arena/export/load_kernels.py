"""Loads exported kernel repositories with Hugging Face's `kernels` and compares with the oracles.

test_hf_kernels.py starts it and reads the largest differences that it writes. In Triton's
interpreter the kernels are called below the public functions, which refuse CPU tensors; the public
functions compute these with torch. On a GPU the public functions run the kernels. All is float32.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from kernels import get_local_kernel

from trapline import gold

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def main(folder: Path) -> None:
    found = {}
    for family, (by_api, by_kernels) in COMPARED.items():
        kernel = get_local_kernel(folder / f"trapline-{family}")
        torch.manual_seed(0)
        found[family] = by_api(kernel)
        if INTERPRETED:
            found[family] |= by_kernels(kernel)
    loaded = [name for name in sys.modules if name.startswith("_trapline_")]
    assert len(loaded) > len(COMPARED), loaded
    (folder / "differences.json").write_text(json.dumps(found))


def inside(kernel, module):
    return import_module(f"{kernel.__name__}.{module}")


def difference(got, expected) -> float:
    return float(np.abs(got.detach().cpu().double().numpy() - expected).max())


def random(*shape):
    tensor = torch.randn(*shape)
    return tensor.to(DEVICE), tensor.double().numpy()


def norms(kernel) -> dict[str, float]:
    (x, x_), (w, w_), (b, b_), (dy, dy_) = random(5, 96), random(96), random(96), random(5, 96)
    layer = torch.nn.LayerNorm(96)
    layer.weight.data, layer.bias.data = w, b
    gradients, exact = kernel.layer_norm_backward(dy, x, w), gold.layer_norm_backward(dy_, x_, w_)
    return {
        "layer_norm": difference(kernel.layer_norm(x, w, b), gold.layer_norm(x_, w_, b_)),
        "rms_norm": difference(kernel.rms_norm(x, w), gold.rms_norm(x_, w_)),
        "dx": difference(gradients.dx, exact.dx),
        "layer": difference(kernel.layers.LayerNorm.forward(layer, x), gold.layer_norm(x_, w_, b_)),
    }


def norm_kernels(kernel) -> dict[str, float]:
    norm = inside(kernel, "norms.triton.norm")
    (x, x_), (w, w_), (b, b_), (dy, dy_) = random(5, 96), random(96), random(96), random(5, 96)
    y, _, mean, rstd = norm.norm_forward(x, None, w, b, 1e-5, True)
    dx, dw, _ = norm.norm_backward(dy, None, x, w, mean, rstd, 1e-5, True, True)
    exact = gold.layer_norm_backward(dy_, x_, w_)
    return {
        "forward kernel": difference(y, gold.layer_norm(x_, w_, b_)),
        "backward kernel": difference(dx, exact.dx),
        "weight kernel": difference(dw, exact.dweight),
    }


def softmax_topk(kernel) -> dict[str, float]:
    logits, logits_ = random(3, 300)
    got, expected = kernel.softmax_topk(logits, 7), gold.softmax_topk(logits_, 7)
    return {
        "values": difference(got.values, expected.values),
        "indices": difference(got.indices, expected.indices),
        "lse": difference(got.lse, expected.lse),
    }


def topk_kernels(kernel) -> dict[str, float]:
    topk = inside(kernel, "softmax_topk.triton.topk")
    topk.processors = lambda _: 4
    logits, logits_ = random(3, 300)
    values, indices, lse, _ = topk._softmax_topk(logits, 7, 1.0, None, False)
    expected = gold.softmax_topk(logits_, 7)
    return {
        "values kernel": difference(values, expected.values),
        "indices kernel": difference(indices, expected.indices),
        "lse kernel": difference(lse, expected.lse),
    }


def heads():
    return random(1, 4, 40, 16), random(1, 2, 40, 16), random(1, 2, 40, 16)


def attention(kernel) -> dict[str, float]:
    (q, q_), (k, k_), (v, v_) = heads()
    q.requires_grad_()
    out = kernel.flash_attention(q, k, v, causal=True)
    out.sum().backward()
    return {
        "out": difference(out, gold.flash_attention(q_, k_, v_, causal=True)),
        "dq": difference(q.grad, query_gradient(q_, k_, v_)),
    }


def query_gradient(q, k, v):
    out, lse = gold.flash_attention_lse(q, k, v, causal=True)
    return gold.flash_attention_backward(np.ones_like(q), q, k, v, out, lse, causal=True)[0]


def attention_kernels(kernel) -> dict[str, float]:
    (q, q_), (k, k_), (v, v_) = heads()
    dense = inside(kernel, "attention.dense")
    tiles = inside(kernel, "attention.dense.triton.tiles")
    backward = inside(kernel, "attention.dense.triton.backward")
    tile = tiles.Tile(queries=16, keys=32, warps=4, stages=1)
    problem = dense.dense_problem(q, k, v, True, 0, 0.0, 16**-0.5)
    out, lse = inside(kernel, "attention.dense.triton.forward").forward(problem, tile, False)
    both = backward.BackwardTiles(tile, tile)
    ones, zeros = torch.ones_like(out), torch.zeros_like(lse)
    dq, _, _ = backward.backward(problem, out, lse, ones, zeros, both, False)
    return {
        "forward kernel": difference(out, gold.flash_attention(q_, k_, v_, causal=True)),
        "backward kernel": difference(dq, query_gradient(q_, k_, v_)),
    }


def pages():
    table, lengths = torch.tensor([[0, 3], [4, 1]]).int(), torch.tensor([20, 9]).int()
    return random(2, 4, 16), random(5, 2, 16, 16), random(5, 2, 16, 16), table, lengths


def paged(kernel) -> dict[str, float]:
    (q, q_), (k, k_), (v, v_), table, lengths = pages()
    got = kernel.paged_attention(q, k, v, table.to(DEVICE), lengths.to(DEVICE))
    exact = gold.paged_attention(q_, k_, v_, table.numpy(), lengths.numpy())
    return {"out": difference(got, exact)}


def paged_kernels(kernel) -> dict[str, float]:
    (q, q_), (k, k_), (v, v_), table, lengths = pages()
    out = torch.full_like(q, 9.0)
    rules = (1, None, None, None, 0, 0.0, 16**-0.5, 0, None)
    problem = inside(kernel, "attention.paged").PagedProblem(
        q, k, v, table, lengths, None, *rules, out
    )
    inside(kernel, "attention.paged.triton.attention").attention(problem)
    exact = gold.paged_attention(q_, k_, v_, table.numpy(), lengths.numpy())
    return {"kernel": difference(out, exact)}


COMPARED = {
    "norms": (norms, norm_kernels),
    "softmax-topk": (softmax_topk, topk_kernels),
    "attention": (attention, attention_kernels),
    "paged": (paged, paged_kernels),
}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
