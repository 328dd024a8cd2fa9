"""The Triton kernels: right in the interpreter, compilable for a Hopper GPU. No GPU is needed."""

from pathlib import Path

import numpy as np
import pytest

from trapline.gold.norms import oracle

pytest.importorskip("torch")
pytest.importorskip("triton")
from trapline.gold.norms.triton import backward

HERE = Path(__file__).parent
#: Widths that are and are not powers of two, one feature, no rows, strided rows (odd widths).
SHAPES = [(5, 1), (3, 7, 33), (2, 3, 48), (0, 8), (3, 1000), (2, 1500), (5, 2500)]
CHOICES = [(True, True, False, True), (True, False, False, False), (False, True, True, True)]
CHOICES += [(False, False, True, False)]
PROBLEMS = [
    {"shape": shape, "centred": centred, "affine": affine, "added": added, "saved": saved}
    for shape in SHAPES
    for centred, affine, added, saved in CHOICES
]
PROBLEMS += [{**PROBLEMS[8], "only": only} for only in ("weight", "bias")]
PROBLEMS += [{**PROBLEMS[8], "mixed": True}]
KERNELS = {
    *("forward_kernel", "backward_kernel", "add_parts_kernel", "team_backward_kernel"),
    *("held_forward_kernel", "wide_forward_kernel", "statistics_kernel"),
    *("row_sums_kernel", "columns_kernel", "clear_kernel"),
}
#: Relative to the largest element: rounding of the answer, and of the sums behind it.
TOLERANCES = {"float32": 3e-6, "float16": 2e-3}


def exact(found, centred):
    """What the oracle says of the same problem."""
    x, dy = found["x"], found["dy"]
    normed = found["total"] if "residual" in found else x
    w, b = found.get("w", np.ones(x.shape[-1])), found.get("b", np.zeros(x.shape[-1]))
    if centred:
        y, grads = oracle.layer_norm(normed, w, b), oracle.layer_norm_backward(dy, normed, w)
    else:
        y = oracle.rms_norm(normed, w, 1e-5)
        grads = oracle.rms_norm_backward(dy, normed, w, 1e-5)
    wanted = {"y": y, "dx": grads.dx + found.get("dtotal", 0.0)}
    wanted |= {"dw": grads.dgamma} if "w" in found else {}
    wanted |= {"db": grads.dbeta} if "b" in found else {}
    return wanted


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_interpreted_kernels_agree_with_the_oracle(interpreted, number, dtype):
    with np.load(interpreted / f"{number}-{dtype}.npz") as kept:
        found = {name: kept[name].astype(np.float64) for name in kept.files}
    if "residual" in found:
        assert np.allclose(found["total"], found["x"] + found["residual"], rtol=1e-3, atol=1e-3)
    for name, want in exact(found, PROBLEMS[number]["centred"]).items():
        allowed = TOLERANCES[dtype] * max(1.0, np.abs(want).max(initial=0.0))
        np.testing.assert_allclose(found[name], want, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_every_configuration_compiles_for_hopper(compiled, dtype):
    """For sm_90, within its shared memory; loads that come ahead are 16 bytes wide."""
    found = compiled(HERE / "compile_kernels.py", dtype)
    assert {entry["kernel"] for entry in found} == KERNELS
    teams = [entry for entry in found if entry["kernel"] == "team_backward_kernel"]
    assert all(entry["copies"] > 0 for entry in teams)


@pytest.mark.parametrize("words", [4097, 5000, 6144, 8192, 10_000, 32_768, 65_536])
def test_shares_of_a_team_cover_a_row(words):
    share, members = backward.share_of(words), backward.members(words)
    assert share % 32 == 0
    assert share <= backward.TEAM.share
    assert share * (members - 1) < words <= share * members


def test_kernels_launch_on_the_device_of_their_tensors(monkeypatch, entered):
    """Whichever device is current: a launch would go there, and read the other one's addresses."""
    import torch

    from trapline.gold.norms.triton import norm as kernels

    launched = []
    for name in ("forward", "backward"):
        monkeypatch.setattr(kernels, name, lambda *_: launched.append(list(entered)))
    x, dy = torch.zeros(2, 3, 8)
    kernels.norm_forward(x, None, None, None, 1e-5, True)
    kernels.norm_backward(dy, None, x, None, None, None, 1e-5, True, False)
    assert [one[0] is tensor for one, tensor in zip(launched, (x, dy), strict=True)] == [True] * 2
    assert entered == []
