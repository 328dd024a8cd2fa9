"""Kernels that do not compile: the next tier serves, with one warning that says why."""

import warnings

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.compiler.errors import CompilationError  # noqa: E402

from trapline.gold import fallback  # noqa: E402
from trapline.gold.attention.dense import dense_problem, registry  # noqa: E402
from trapline.gold.device import compile_for_hopper  # noqa: E402
from trapline.gold.errors import FallbackWarning, UnsupportedError  # noqa: E402
from trapline.gold.norms import registry as norms  # noqa: E402


@triton.jit
def broken_kernel(x):
    x.no_such_method()


def broken(*_given, **_options):
    """A tier whose kernel does not compile."""
    compile_for_hopper(broken_kernel, {"x": "*fp32"}, {})


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fallback, "_failed", set())
    caches = fallback.gluon_is_tested, registry.forward_tiers, registry.backward_tiers
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_next_tier_serves_with_one_warning_that_says_why():
    tiers = {"hopper": broken, "triton": lambda: 7}
    with pytest.warns(FallbackWarning) as said:
        answers = [fallback.first_that_compiles("this", tiers) for _ in range(3)]
    assert answers == [7, 7, 7]
    (warning,) = said
    text = str(warning.message)
    assert "the hopper kernels of this do not compile" in text
    assert "no_such_method" in text
    assert "the tier 'triton' serves" in text
    assert triton.__version__ in text


def test_failures_of_one_operation_leave_others_alone():
    tiers = {"hopper": broken, "triton": lambda: 7}
    with pytest.warns(FallbackWarning):
        fallback.first_that_compiles("this", tiers)
    assert fallback.first_that_compiles("that", {"hopper": lambda: 8, "triton": broken}) == 8


def test_last_tier_and_other_errors_raise():
    with pytest.raises(CompilationError), pytest.warns(FallbackWarning):
        fallback.first_that_compiles("this", {"hopper": broken, "triton": broken})

    def fails():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        fallback.first_that_compiles("that", {"hopper": fails, "triton": lambda: 7})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("PassManager::run failed"), True),
        (triton.runtime.errors.PTXASError("ptxas exited with 255"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (torch.OutOfMemoryError("PassManager"), False),
        (AttributeError("x"), False),
    ],
)
def test_errors_of_the_compiler(error, expected):
    assert fallback.is_compile_error(error) == expected


def attention_problem():
    q, k, v = torch.randn(3, 1, 2, 9, 64, generator=torch.manual_seed(0)).half()
    return dense_problem(q, k, v, causal=True, scale=0.125)


@pytest.fixture
def hopper_and_triton(monkeypatch):
    """Replaces the tiers of attention by these functions."""

    def replace(**runs):
        made = {
            name: registry.Tier(run, lambda _: None, lambda _: True) for name, run in runs.items()
        }
        monkeypatch.setattr(registry, "_require_gpu", lambda *_: None)
        monkeypatch.setattr(registry, "forward_tiers", lambda: made)
        monkeypatch.setattr(registry, "backward_tiers", lambda: made)

    return replace


def test_attention_falls_back_to_triton_then_to_torch(hopper_and_triton):
    problem = attention_problem()
    wanted = registry.forward_operator(*problem, "torch")
    hopper_and_triton(hopper=broken, triton=lambda _: wanted)
    with pytest.warns(FallbackWarning, match="the tier 'triton' serves"):
        assert registry.forward_operator(*problem, "kernels")[0] is not None
    hopper_and_triton(hopper=broken, triton=broken)
    with pytest.warns(FallbackWarning, match="the tier 'torch' serves"):
        found = registry.forward_operator(*problem, "kernels")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradients_of_attention_fall_back(hopper_and_triton):
    problem = attention_problem()
    out, lse = registry.forward_operator(*problem, "torch")
    saved = torch.ones_like(out), torch.zeros_like(lse), out, lse
    wanted = registry.backward_operator(*saved, *problem, "torch")
    hopper_and_triton(hopper=broken, triton=broken)
    with pytest.warns(FallbackWarning):
        found = registry.backward_operator(*saved, *problem, "kernels")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_requested_tier_raises_instead(hopper_and_triton):
    hopper_and_triton(hopper=broken, triton=lambda _: None)
    with pytest.raises(CompilationError, match="no_such_method"):
        registry.forward_operator(*attention_problem(), "hopper")


def test_norms_fall_back(monkeypatch):
    monkeypatch.setattr(norms, "_kernels", lambda _: (broken, broken))
    x = torch.randn(3, 16, generator=torch.manual_seed(0), requires_grad=True)
    w = torch.ones(16)
    wanted = norms.norm(x, None, w, None, 1e-5, "torch", centred=True)[0]
    with pytest.warns(FallbackWarning, match="norms"):
        found = norms.norm(x, None, w, None, 1e-5, "kernels", centred=True)[0]
    assert torch.equal(found, wanted)
    with pytest.warns(FallbackWarning, match="norms' gradients"):
        (dx,) = torch.autograd.grad(found.square().sum(), x)
    assert torch.equal(dx, torch.autograd.grad(wanted.square().sum(), x)[0])


def test_softmax_topk_falls_back(monkeypatch, entered):
    from trapline.gold.softmax_topk.api import softmax_topk
    from trapline.gold.softmax_topk.triton import topk

    monkeypatch.setattr(topk, "_by_kernels", broken)
    logits = torch.randn(4, 50, generator=torch.manual_seed(0))
    for temperature in (None, torch.tensor([0.5, 1.0, 2.0, 3.0])):
        each = 1.0 if temperature is None else temperature
        wanted = softmax_topk(logits, 5, temperature=each)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = topk.topk_operator(logits, 5, 1.0, temperature, False)
        assert [str(one.category.__name__) for one in said] == ["FallbackWarning"] * (
            temperature is None
        )
        assert torch.equal(found[0], wanted.values)
        assert torch.equal(found[1], wanted.indices)


def test_paged_attention_and_append_fall_back(monkeypatch, entered):
    from trapline.gold.attention.paged import reference
    from trapline.gold.attention.paged.triton import attention, pages

    monkeypatch.setattr(attention, "_by_triton", broken)
    monkeypatch.setattr(pages, "append", broken)
    for module in (attention, pages):
        monkeypatch.setattr(module, "require_gpu", lambda _: None)
    torch.manual_seed(0)
    rows, slots = torch.randn(2, 3, 2, 16), torch.tensor([0, 1, 17])
    kept = [torch.zeros(2, 2, 2, 16, 16) for _ in range(2)]
    reference.append(*rows, *kept[0], slots, *[None] * 4)
    with pytest.warns(FallbackWarning, match="paged append"):
        pages.append_operator(*rows, *kept[1], slots, *[None] * 4)
    assert torch.equal(*kept)
    q, table = torch.randn(1, 4, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    lengths = torch.tensor([18], dtype=torch.int32)
    given = (q, *kept[0], table, lengths, None, 1, *[None] * 3, 0, 0.0, 0.25, 0, None)
    outs = torch.empty_like(q), torch.empty_like(q)
    reference.attention_operator(*given, outs[0])
    with pytest.warns(FallbackWarning, match="paged attention"):
        attention.attention_operator(*given, outs[1])
    assert torch.equal(*outs)


def test_packed_products_fall_back_from_hopper(monkeypatch, entered):
    from trapline.gold.ternary.triton import packed_matmul

    x, plane = torch.ones(2, 128).half(), torch.zeros(3, 32, dtype=torch.uint8)
    scales = torch.ones(3, 1).half()
    monkeypatch.setattr(packed_matmul, "may_start_early", lambda _: True)
    monkeypatch.setattr(packed_matmul, "few_rows", broken)
    monkeypatch.setattr(packed_matmul, "gemv", lambda _x, _p, _s, y, _b: y.fill_(5))
    with pytest.warns(FallbackWarning, match="the hopper kernels of packed products"):
        y = packed_matmul.packed_matmul(x, plane, scales)
    assert y.eq(5).all()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1"])
def test_outside_of_the_range_gluon_is_off_with_one_warning(monkeypatch, version):
    monkeypatch.setattr(fallback, "_version", lambda: version)
    with pytest.warns(FallbackWarning) as said:
        tiers = [registry.forward_tiers(), registry.backward_tiers()]
    (warning,) = said
    assert not fallback.gluon_is_tested()
    assert f"Triton {version} is outside of the tested range, 3.6 to 3.9" in str(warning.message)
    assert [list(one) for one in tiers] == [["triton"]] * 2
    monkeypatch.setattr(registry, "_require_gpu", lambda *_: None)
    with pytest.raises(UnsupportedError, match="impl='hopper' is off: Triton"):
        registry.tier_for(attention_problem(), "hopper", tiers[0])


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0+git5c9"])
def test_inside_of_the_range_nothing_is_said(monkeypatch, version):
    monkeypatch.setattr(fallback, "_version", lambda: version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fallback.gluon_is_tested()
