"""Repeated calls on a GPU give the answers of calls that are checked each time."""

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.needs_gpu

from trapline import gold  # noqa: E402
from trapline.gold import call_plans  # noqa: E402


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def heads(length=256, width=128, dtype=torch.bfloat16):
    return [drawn(2, 4, length, width, dtype=dtype) for _ in range(3)]


def packed():
    """Views of one tensor, as a projection to queries, keys and values gives them."""
    return [x.transpose(1, 2) for x in drawn(2, 256, 3, 4, 128).unbind(2)]


def paged():
    table = torch.arange(64, device="cuda").view(4, 16).int()
    lengths = torch.full((4,), 200, device="cuda", dtype=torch.int32)
    return drawn(4, 32, 128), drawn(64, 8, 16, 128), drawn(64, 8, 16, 128), table, lengths


def backward():
    q, k, v = heads()
    return drawn(2, 4, 256, 128), q, k, v, *gold.flash_attention_lse(q, k, v, causal=True)


def varlen():
    ends = torch.tensor([0, 100, 256, 512], device="cuda", dtype=torch.int32)
    return *(drawn(512, 4, 128) for _ in range(3)), ends, ends.clone(), 256, 256


CASES = {
    "attention": ("flash_attention", heads, {"causal": True}),
    "attention, narrow": ("flash_attention", lambda: heads(width=64), {}),
    "attention, long": ("flash_attention", lambda: heads(2048, 64), {"causal": True}),
    "attention, window": ("flash_attention", lambda: heads(dtype=torch.float32), {"window": 64}),
    "attention, tokens first": ("flash_attention", heads, {"layout": "bthd"}),
    "attention, packed": ("flash_attention", packed, {"causal": True}),
    "attention with lse": ("flash_attention_lse", heads, {"causal": True}),
    "attention backward": ("flash_attention_backward", backward, {"causal": True}),
    "attention, sequences": ("flash_attention_varlen", varlen, {"causal": True}),
    "layer norm": ("layer_norm", lambda: (drawn(64, 1024), drawn(1024), drawn(1024)), {}),
    "layer norm, wide": ("layer_norm", lambda: (drawn(64, 20000), drawn(20000)), {}),
    "layer norm backward": ("layer_norm_backward", lambda: (drawn(64, 96), drawn(64, 96)), {}),
    "RMS norm": ("rms_norm", lambda: (drawn(64, 96), drawn(96), 1e-6, drawn(64, 96)), {}),
    "top-k, short rows": ("softmax_topk", lambda: (drawn(64, 8192), 8), {}),
    "top-k, many rows": ("softmax_topk", lambda: (drawn(300, 10000), 300), {}),
    "top-k, long rows": ("softmax_topk", lambda: (drawn(8, 32000), 64), {"log_probs": True}),
    "paged": ("paged_attention", paged, {}),
    "paged, window": ("paged_attention", paged, {"window": 100}),
}


def checked(function, arguments, options):
    """The answer without plans."""
    call_plans.repeating = False
    try:
        return function(*arguments, **options)
    finally:
        call_plans.repeating = True


def tensors_in(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("case", CASES)
def test_repeated_calls_give_the_same_bits(case):
    name, make, options = CASES[case]
    function = getattr(gold, name)
    call_plans.forget_plans()
    before = call_plans.repetitions
    for _ in range(5):
        arguments = make()
        found = tensors_in(function(*arguments, **options))
        wanted = tensors_in(checked(function, arguments, options))
        for got, want in zip(found, wanted, strict=True):
            assert (got is None and want is None) or torch.equal(got, want)
    assert call_plans.repetitions >= before + 3


def test_gradients_are_repeated():
    call_plans.forget_plans()
    for number in range(5):
        q, k, v = (x.requires_grad_() for x in heads())
        dout, before = torch.randn_like(q), call_plans.repetitions
        found = torch.autograd.grad(gold.flash_attention(q, k, v, causal=True), (q, k, v), dout)
        assert call_plans.repetitions - before == (2 if number >= 2 else 0)
        out = checked(gold.flash_attention, (q, k, v), {"causal": True})
        call_plans.repeating = False
        wanted = torch.autograd.grad(out, (q, k, v), dout)
        call_plans.repeating = True
        assert all(map(torch.equal, found, wanted))


def test_threads_and_streams_and_graphs():
    q, k, v = heads()
    wanted, found = checked(gold.flash_attention, (q, k, v), {}), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found.append(torch.equal(gold.flash_attention(q, k, v), wanted))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80
    arguments = paged()
    expected = checked(gold.paged_attention, arguments, {})
    for _ in range(3):
        gold.paged_attention(*arguments)
    graph, before = torch.cuda.CUDAGraph(), call_plans.repetitions
    with torch.cuda.graph(graph):
        out, rows = gold.flash_attention(q, k, v), gold.paged_attention(*arguments)
    assert call_plans.repetitions == before + 2
    for _ in range(3):
        out.zero_()
        rows.zero_()
        graph.replay()
        assert torch.equal(out, wanted)
        assert torch.equal(rows, expected)
