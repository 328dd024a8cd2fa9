"""The public functions: what they accept, what they reject, and which implementation runs."""

import numpy as np
import pytest

from trapline.gold.attention import oracle
from trapline.gold.attention.api import (
    flash_attention,
    flash_attention_backward,
    flash_attention_lse,
    flash_attention_varlen,
)
from trapline.gold.errors import DTypeError, RangeError, ShapeError


def draw(*, dtype=np.float64, H=4, G=2, T=5, S=6):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, H, T, 3)).astype(dtype)
    k, v = rng.standard_normal((2, 1, G, S, 3)).astype(dtype)
    return q, k, v


def test_numpy_goes_to_the_oracle():
    q, k, v = draw(dtype=np.float32)
    out, lse = flash_attention_lse(q, k, v, causal=True, window=3, softcap=2.0, scale=0.3)
    want = oracle.attention(q, k, v, causal=True, window=3, softcap=2.0, scale=0.3)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, want[0], rtol=1e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6)
    np.testing.assert_array_equal(
        flash_attention(q, k, v, causal=True, window=3, softcap=2.0, scale=0.3), out
    )


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_tokens_before_heads(kind):
    """flash-attn's layout: the same numbers, results and gradients in that layout too."""
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(x) if kind == "torch" else x for x in draw()]
    turned = [x.swapaxes(1, 2) for x in given]
    rules = {"causal": True, "window": 3, "softcap": 2.0}
    out, lse = flash_attention_lse(*given, **rules)
    found = flash_attention_lse(*turned, **rules, layout="bthd")
    assert found.out.shape == (1, 5, 4, 3)
    np.testing.assert_array_equal(found.out.swapaxes(1, 2), out)
    np.testing.assert_array_equal(found.lse, lse)
    np.testing.assert_array_equal(flash_attention(*turned, **rules, layout="bthd"), found.out)
    expected = flash_attention_backward(out, *given, out, lse, **rules)
    grads = flash_attention_backward(
        found.out, *turned, found.out, found.lse, **rules, layout="bthd"
    )
    for one, other in zip(grads, expected, strict=True):
        np.testing.assert_array_equal(one.swapaxes(1, 2), other)


def test_a_likely_mistake_of_the_layout_is_named():
    q, k, v = (x.swapaxes(1, 2) for x in draw(H=4, G=2, T=7, S=9))
    with pytest.raises(ShapeError, match="give layout='bthd'"):
        flash_attention(q, k, v)
    assert flash_attention(q, k, v, layout="bthd").shape == (1, 7, 4, 3)
    with pytest.raises(RangeError, match="layout must be 'bhtd' or 'bthd', got 'tbhd'"):
        flash_attention(q, k, v, layout="tbhd")
    with pytest.raises(ShapeError, match="multiple of the number of key/value heads, got 7 and 2"):
        flash_attention(*(x.swapaxes(1, 2) for x in draw(H=7, G=2)), layout="bthd")


def test_half_precision_keeps_a_float32_lse():
    out, lse = flash_attention_lse(*draw(dtype=np.float16))
    assert out.dtype == np.float16
    assert lse.dtype == np.float32


def test_tensors_go_to_torch_and_agree():
    torch = pytest.importorskip("torch")
    arrays = draw()
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    out = flash_attention(*tensors, causal=True, window=4)
    out.sum().backward()
    np.testing.assert_allclose(
        out.detach(), flash_attention(*arrays, causal=True, window=4), atol=1e-13
    )
    assert tensors[0].grad.shape == tensors[0].shape


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_packed_sequences(kind):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((6, 4, 3))
    k, v = rng.standard_normal((2, 9, 2, 3))
    cu_q, cu_k = np.array([0, 2, 2, 6], np.int32), np.array([0, 4, 5, 9], np.int32)
    wanted = np.zeros_like(q)
    for i in range(3):
        here, there = slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])
        one = [x.swapaxes(0, 1)[None] for x in (q[here], k[there], v[there])]
        wanted[here] = oracle.attention(*one, causal=True)[0][0].swapaxes(0, 1)
    arrays = [q, k, v, cu_q, cu_k]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = [torch.tensor(x) for x in arrays]
    got = flash_attention_varlen(*arrays, 4, 4, causal=True, check=True)
    np.testing.assert_allclose(got, wanted, atol=1e-13)


@pytest.mark.parametrize("missing", ["B", "H", "HG", "T", "S", "D"])
def test_empty_axes(missing):
    """Results and gradients have the right shapes, and zeros where no query meets a key."""
    torch = pytest.importorskip("torch")
    sizes = {"B": 2, "H": 4, "G": 2, "T": 3, "S": 5, "D": 4} | dict.fromkeys(missing, 0)
    B, H, G, T, S, D = sizes.values()
    rng = np.random.default_rng(4)
    q, dout = rng.standard_normal((2, B, H, T, D))
    k, v = rng.standard_normal((2, B, G, S, D))
    wanted = flash_attention_lse(q, k, v, causal=True)
    assert wanted.out.shape == q.shape
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    found = flash_attention_lse(*tensors, causal=True)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got.detach(), want, atol=1e-13)
    rules = {"causal": True, "scale": 0.5}
    grads = torch.autograd.grad(found.out, tensors, torch.tensor(dout))
    for got, want in zip(grads, oracle.attention_backward(dout, q, k, v, **rules), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-13)


@pytest.mark.parametrize("sizes", [(0, 5, 4, 3), (6, 0, 4, 3), (6, 5, 0, 3), (6, 5, 4, 0)])
@pytest.mark.parametrize("sequences", [0, 1])
def test_empty_axes_of_packed_sequences(sizes, sequences):
    """No queries, no keys, no query heads, no width; in one sequence, and in none."""
    torch = pytest.importorskip("torch")
    tokens, keys, H, D = sizes
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((n, h, D)) for n, h in ((tokens, H), (keys, 2), (keys, 2)))
    ends = [np.array([0, n][: sequences + 1], np.int32) for n in (tokens, keys)]
    want = flash_attention_varlen(q, k, v, *ends, tokens, keys, causal=True)
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    cu = [torch.tensor(x) for x in ends]
    got = flash_attention_varlen(*tensors, *cu, tokens, keys, causal=True)
    np.testing.assert_allclose(got.detach(), want, atol=1e-13)
    for x, grad in zip(tensors, torch.autograd.grad(got.sum(), tensors), strict=True):
        assert grad.shape == x.shape


def test_bad_shapes_are_rejected():
    q, k, v = draw()
    for arrays in ((q[0], k, v), (q, k[..., :2], v), (q, k, v[:, :, :5]), (q[:, :3], k, v)):
        with pytest.raises(ShapeError):
            flash_attention(*arrays)
    with pytest.raises(ShapeError, match="must be a multiple of"):
        flash_attention(q[:, :3], k, v)
    with pytest.raises(ShapeError, match="got 4 and 0"):
        flash_attention(q, k[:, :0], v[:, :0])


def test_bad_dtypes_are_rejected():
    q, k, v = draw()
    for arrays in ((q.astype(int), k, v), (q, k.astype(np.float32), v), (q, k, v.tolist())):
        with pytest.raises(DTypeError):
            flash_attention(*arrays)


@pytest.mark.parametrize(
    "rule", [{"window": 0}, {"softcap": -1.0}, {"scale": 0.0}, {"scale": float("nan")}]
)
def test_bad_options_are_rejected(rule):
    with pytest.raises(RangeError):
        flash_attention(*draw(), **rule)


def test_no_silent_fallback():
    with pytest.raises(DTypeError):
        flash_attention(*draw(), impl="torch")
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(x) for x in draw()]
    with pytest.raises(NotImplementedError, match="impl='kernels' needs CUDA tensors"):
        flash_attention(*tensors, impl="kernels")


@pytest.mark.parametrize(
    ("cu_q", "max_q", "error"),
    [
        ([0, 2, 5], 3, RangeError),
        ([1, 2, 6], 4, RangeError),
        ([0, 4, 3, 6], 4, RangeError),
        ([0, 1, 6], 4, RangeError),
    ],
)
def test_bad_boundaries_are_rejected(cu_q, max_q, error):
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 6, 2, 3))
    ends = np.array(cu_q, np.int32)
    good = np.linspace(0, 6, len(cu_q)).astype(np.int32)
    with pytest.raises(error, match="cu_q"):
        flash_attention_varlen(q, k, v, ends, good, max_q, 6, check=True)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("cu_q", [[0, 4, 3, 6], [-1, 6], [0, 7], [0, 1, 6]])
def test_boundaries_are_checked_by_default_on_the_cpu(kind, cu_q):
    q, k, v = np.zeros((3, 6, 2, 3))
    ends = np.array(cu_q, np.int32)
    good = np.linspace(0, 6, len(cu_q)).astype(np.int32)
    arrays = [q, k, v, ends, good]
    if kind == "torch":
        arrays = [pytest.importorskip("torch").tensor(x) for x in arrays]
    with pytest.raises(RangeError, match="cu_q"):
        flash_attention_varlen(*arrays, 4, 6)


def test_tokens_outside_all_sequences_pass_the_default_check_only():
    q, k, v = np.ones((3, 6, 2, 3))
    ends = np.array([1, 4], np.int32)
    out = flash_attention_varlen(q, k, v, ends, ends, 3, 3)
    np.testing.assert_array_equal(out[:, 0, 0], [0, 1, 1, 1, 0, 0])
    with pytest.raises(RangeError, match="from 0 to 6"):
        flash_attention_varlen(q, k, v, ends, ends, 3, 3, check=True)


OPTIONS = [{}, {"causal": True, "scale": 0.3}, {"window": 3, "softcap": 2.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_numpy_backward_agrees_with_finite_differences(options):
    """Of a loss through out and lse, at every element of q, k and v."""
    arrays = draw()
    rng = np.random.default_rng(6)
    dout, dlse = rng.standard_normal((1, 4, 5, 3)), rng.standard_normal((1, 4, 5))
    out, lse = flash_attention_lse(*arrays, **options)
    grads = flash_attention_backward(dout, *arrays, out, lse, dlse=dlse, **options)

    def loss():
        found = flash_attention_lse(*arrays, **options)
        return np.sum(found.out * dout) + np.sum(found.lse * dlse)

    for array, grad in zip(arrays, grads, strict=True):
        numeric = np.zeros_like(array)
        for place in np.ndindex(array.shape):
            kept = array[place]
            ends = []
            for array[place] in (kept + 1e-6, kept - 1e-6):
                ends.append(loss())
            array[place] = kept
            numeric[place] = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(grad, numeric, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward_agrees_with_autograd(options):
    torch = pytest.importorskip("torch")
    inputs = [torch.tensor(x, requires_grad=True) for x in draw()]
    out, lse = flash_attention_lse(*inputs, **options)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, inputs, dout)
    saved = [x.detach() for x in (dout, *inputs, out, lse)]
    by_torch = flash_attention_backward(*saved, **options)
    by_oracle = flash_attention_backward(*(x.numpy() for x in saved), **options)
    for want, ours, oracles in zip(wanted, by_torch, by_oracle, strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=0)
        np.testing.assert_allclose(oracles, want, atol=1e-12)
        assert isinstance(oracles, np.ndarray)


def test_backward_keeps_dtypes_and_rejects_bad_arrays():
    q, k, v = draw(dtype=np.float16)
    out, lse = flash_attention_lse(q, k, v)
    grads = flash_attention_backward(out, q, k, v, out, lse)
    assert [x.dtype for x in grads] == [np.float16] * 3
    assert grads._fields == ("dq", "dk", "dv")
    with pytest.raises(ShapeError, match="lse"):
        flash_attention_backward(out, q, k, v, out, lse[:, :, 1:])
    with pytest.raises(DTypeError, match="lse must be float32"):
        flash_attention_backward(out, q, k, v, out, lse.astype(np.float64))
    with pytest.raises(DTypeError, match="dout"):
        flash_attention_backward(out.astype(np.float32), q, k, v, out, lse)


def test_boundaries_are_int32():
    q, k, v = np.zeros((3, 4, 2, 3))
    ends = np.array([0, 4])
    with pytest.raises(DTypeError, match="int32"):
        flash_attention_varlen(q, k, v, ends, ends, 4, 4)
