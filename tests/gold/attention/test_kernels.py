"""The Triton kernels: right in the interpreter, compilable for a Hopper GPU. No GPU is needed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from trapline.gold.attention import oracle

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from trapline.gold.attention.api import flash_attention_varlen  # noqa: E402
from trapline.gold.attention.dense.triton.backward import parts_of  # noqa: E402

HERE = Path(__file__).parent
#: B, H, G, T, S, D; causal, window, softcap; dtype. Uneven tiles, empty rows, odd widths, windows
#: narrower and wider than a tile, groups of two and three, rows no descriptor can hold, the widest
#: window there is (added to a position it must not leave 32 bits); nothing of each thing in turn.
PROBLEMS = [
    ((1, 1, 1, 60, 90, 40), (True, 0, 0.0), "float32"),
    ((1, 2, 2, 40, 20, 16), (True, 7, 0.0), "float32"),
    ((2, 3, 1, 33, 33, 8), (False, 9, 1.5), "float16"),
    ((1, 1, 1, 3, 0, 4), (False, 0, 0.0), "float32"),
    ((1, 1, 1, 50, 140, 32), (False, 70, 0.0), "float32"),
    ((1, 2, 1, 20, 64, 80), (False, 0, 0.0), "float16"),
    ((1, 1, 1, 35, 40, 16), (False, 0, 0.0), "float32"),
    ((1, 1, 1, 40, 17, 20), (True, 0, 0.0), "float16"),
    ((1, 1, 1, 20, 70, 160), (True, 64, 3.0), "float16"),
    ((1, 1, 1, 20, 40, 16), (True, 2**31 - 1, 0.0), "float32"),
    ((0, 2, 1, 3, 4, 8), (True, 0, 0.0), "float32"),
    ((2, 0, 2, 3, 4, 8), (True, 0, 0.0), "float32"),
    ((2, 0, 0, 3, 4, 8), (True, 0, 0.0), "float32"),
    ((1, 2, 1, 0, 4, 8), (True, 0, 0.0), "float32"),
    ((1, 2, 1, 3, 4, 0), (True, 0, 0.0), "float32"),
]
#: Boundaries of queries and of keys that leave tokens over: at the end, at both ends, all of them.
PACKINGS = [
    ([0, 3, 10], [0, 7, 12]),
    ([3, 3, 50], [40, 45, 50]),
    ([0], [0]),
    ([5, 5], [5, 5]),
    ([0, 5], [0, 0]),
]
TOLERANCES = {"float32": (1e-5, 1e-4), "float16": (4e-3, 3e-2)}


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_interpreted_kernels_agree_with_the_oracle(interpreted, number):
    """Forward and backward, by descriptors and by pointers."""
    with np.load(interpreted / f"{number}.npz") as kept:
        found = {name: kept[name].astype(np.float64) for name in kept.files}
    shape, (causal, window, softcap), dtype = PROBLEMS[number]
    D = shape[-1]
    rules = {"causal": causal, "window": window or None, "softcap": softcap}
    rules["scale"] = max(D, 1) ** -0.5
    inputs = [found[name] for name in "qkv"]
    wanted = dict(zip(("out", "lse"), oracle.attention(*inputs, **rules), strict=True))
    grads = oracle.attention_backward(found["dout"], *inputs, **rules)
    wanted |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    answers = {name for name in found if " " in name}
    ways = 2 if all(shape) and D * int(dtype[-2:]) % 128 == 0 else 1
    assert len(answers) == ways * 5
    for answer in answers:
        name = answer.split()[0]
        limit = TOLERANCES[dtype][name.startswith("d")]
        np.testing.assert_allclose(found[answer], wanted[name], rtol=0, atol=limit, err_msg=answer)


def test_interpreted_kernels_take_packed_sequences_and_strides(interpreted):
    with np.load(interpreted / "packed.npz") as kept:
        found = {name: kept[name] for name in kept.files}
    cu_q, cu_k = found["cu_q"], found["cu_k"]
    for i in range(len(cu_q) - 1):
        here, there = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        places = {"q": here, "k": there, "v": there}
        one = [found[name][place].swapaxes(0, 1)[None] for name, place in places.items()]
        dout = found["dout"][here].swapaxes(0, 1)[None]
        out, lse = oracle.attention(*one, causal=True, scale=0.3)
        grads = oracle.attention_backward(dout, *one, causal=True, scale=0.3)
        np.testing.assert_allclose(found["out"][here].swapaxes(0, 1), out[0], atol=1e-5)
        np.testing.assert_allclose(found["lse"][:, here], lse[0], atol=1e-5)
        for name, want in zip("qkv", grads, strict=True):
            got = found[f"d{name}"][places[name]].swapaxes(0, 1)
            np.testing.assert_allclose(got, want[0], atol=1e-4, err_msg=f"d{name}")


def test_packed_tokens_may_lie_more_than_2_to_the_31_elements_apart(interpreted):
    assert max(json.loads((interpreted / "far.json").read_text())) < 2e-3


@pytest.mark.parametrize("number", range(len(PACKINGS)))
def test_interpreted_kernels_give_zeros_outside_of_all_sequences(interpreted, number):
    """As the torch path does, in the answer and in every gradient."""
    with np.load(interpreted / f"outside {number}.npz") as kept:
        found = {name: torch.from_numpy(kept[name]) for name in kept.files}
    ends = [torch.tensor(cu, dtype=torch.int32) for cu in PACKINGS[number]]
    inputs = [found[name].requires_grad_() for name in "qkv"]
    out = flash_attention_varlen(*inputs, *ends, 90, 100, causal=True, scale=0.3)
    wanted = {"out": out.detach()}
    grads = torch.autograd.grad(out, inputs, found["dout"])
    wanted |= {f"d{name}": grad for name, grad in zip("qkv", grads, strict=True)}
    for name, want in wanted.items():
        torch.testing.assert_close(found[name], want, rtol=0, atol=1e-5)
    assert not out[ends[0][-1] :].any()


def test_sequences_longer_than_declared_are_cut_and_the_rest_is_zero(interpreted):
    """Nothing is left uninitialised, in the result or in a gradient."""
    with np.load(interpreted / "too long.npz") as kept:
        found = {name: kept[name] for name in kept.files}
    for name in ("out", "dq", "dk", "dv"):
        assert np.isfinite(found[name]).all(), name
    # Declared maxima: 50 - 7 queries, 60 - 7 keys.
    assert not found["out"][83:90].any()
    # 40 keys for 43 queries: the first three see none.
    assert found["out"][43:83].any(axis=(1, 2)).all()
    assert not found["dk"][53:60].any()


@pytest.mark.parametrize("scale", [64**-0.5, 128**-0.5, 0.3, 1.0, 7.0])
def test_a_scale_in_two_parts(scale):
    """The power of two moves no mantissa, so it may come after rounding."""
    mantissa, power = parts_of(scale)
    assert mantissa * power == scale
    assert 0.5 <= mantissa < 1.0
    assert math.frexp(power)[0] == 0.5


@pytest.mark.parametrize("which", ["tiles", pytest.param("features", marks=pytest.mark.full)])
def test_every_tile_and_every_feature_compiles_for_hopper(compiled, which):
    """For sm_90, within its shared memory, on its tensor cores."""
    found = compiled(HERE / "compile_kernels.py", which)
    names = {"forward_kernel", "dkdv_kernel", "dq_kernel"}
    names |= {"rows_kernel"} if which == "tiles" else set()
    assert {entry["kernel"] for entry in found} == names
    for entry in found:
        assert entry["tensor_cores"] == (entry["kernel"] != "rows_kernel"), entry
