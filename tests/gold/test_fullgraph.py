"""`torch.compile(fullgraph=True)` takes every public function of tensors without a graph break."""

import pytest

torch = pytest.importorskip("torch")

from trapline import gold  # noqa: E402


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def pages():
    """Two pages of keys and of values, a table and lengths."""
    table, lengths = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 4]).int()
    return drawn(2, 1, 4, 8), drawn(2, 1, 4, 8) + 1, table, lengths


def of(name, *arguments, **options):
    """A call of a public function. All tensors are drawn before it is compiled."""
    return lambda: lambda: getattr(gold, name)(*arguments, **options)


def heads(*shape):
    return [drawn(*shape) + i for i in range(3)]


def backward_of_attention():
    q, k, v = heads(1, 2, 4, 8)
    out, lse = gold.flash_attention_lse(q, k, v)
    return of("flash_attention_backward", drawn(1, 2, 4, 8), q, k, v, out, lse)()


def appended():
    keys, values, _, _ = pages()
    slots, k, v = torch.tensor([3, 7]), drawn(2, 1, 8), drawn(2, 1, 8) + 1

    def append():
        new = keys.clone(), values.clone()
        gold.paged_append(k, v, *new, slots)
        return new

    return append


ROWS, WEIGHTS, HEADS = drawn(3, 8), drawn(8), heads(1, 2, 4, 8)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)
CALLS = {
    "layer_norm": of("layer_norm", ROWS, WEIGHTS, WEIGHTS + 1),
    "layer_norm_backward": of("layer_norm_backward", ROWS, ROWS + 1, WEIGHTS),
    "rms_norm": of("rms_norm", ROWS, WEIGHTS),
    "rms_norm with a residual": of("rms_norm", ROWS, residual=ROWS + 1),
    "softmax_topk": of("softmax_topk", ROWS, 2, check=False),
    "flash_attention": of("flash_attention", *HEADS, causal=True),
    "flash_attention, tokens first": of("flash_attention", *HEADS, layout="bthd"),
    "flash_attention_lse": of("flash_attention_lse", *HEADS, window=2),
    "flash_attention_backward": backward_of_attention,
    "flash_attention_varlen": of(
        "flash_attention_varlen", *heads(6, 2, 8), ENDS, ENDS, 4, 4, causal=True
    ),
    "scaled_dot_product_attention": of("scaled_dot_product_attention", *HEADS),
    "paged_attention": of("paged_attention", drawn(2, 2, 8), *pages()),
    "paged_append": appended,
    "ternarize": of("ternarize", drawn(4, 128)),
}
#: Those that the quick suite compiles: one of each family.
QUICK = ("layer_norm", "softmax_topk", "flash_attention", "paged_attention")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.full) for x in CALLS]
)
def test_function_compiles_into_one_graph(name):
    torch._dynamo.reset()
    call = CALLS[name]()
    found, wanted = torch.compile(call, fullgraph=True, backend="aot_eager")(), call()
    if isinstance(wanted, torch.Tensor):
        found, wanted = [found], [wanted]
    for got, want in zip(found, wanted, strict=True):
        assert (got is None and want is None) or torch.allclose(got, want, atol=1e-6)
