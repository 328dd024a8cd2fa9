"""Arguments that a stranger might give: a sentence, never garbage, a traceback or a silent NaN."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trapline.gold import (  # noqa: E402 - after the check for torch
    KVCache,
    TernaryLinear,
    beam_search,
    flash_attention,
    flash_attention_backward,
    flash_attention_lse,
    flash_attention_varlen,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    scaled_dot_product_attention,
    softmax_topk,
    ternarize,
    verify_tree,
)
from trapline.gold.errors import DTypeError, RangeError  # noqa: E402

X, Q = torch.randn(3, 8), torch.randn(1, 2, 4, 8)
META, LSE = Q.to("meta"), torch.zeros(1, 2, 4)
PACKED, ENDS = Q[0].transpose(0, 1), torch.tensor([0, 4], dtype=torch.int32)
WIDE = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8, "block_size": 4, "num_blocks": 4}
RULES = {"beam_width": 2, "max_new_tokens": 2, "eos_id": 0}


class Uniform:
    def log_probs(self, prefixes):
        return torch.full((len(prefixes), 5), 0.2).log()


TWO_DEVICES = "all tensors must be on one device, but"
REFUSED = {
    "keys on meta": (lambda: flash_attention(Q, META, Q), TWO_DEVICES),
    "values on meta": (lambda: flash_attention(Q, Q, META), TWO_DEVICES),
    "fewer keys, on meta": (lambda: flash_attention(Q, META[:, :, :2], Q[:, :, :2]), TWO_DEVICES),
    "lse, keys on meta": (lambda: flash_attention_lse(Q, META, Q, window=2), TWO_DEVICES),
    "drop-in, keys on meta": (lambda: scaled_dot_product_attention(Q, META, Q), TWO_DEVICES),
    "out on meta": (lambda: flash_attention_backward(Q, Q, Q, Q, META, LSE), TWO_DEVICES),
    "ends on meta": (
        lambda: flash_attention_varlen(*[PACKED] * 3, ENDS.to("meta"), ENDS, 4, 4),
        TWO_DEVICES,
    ),
    "weight on meta": (lambda: layer_norm(X, torch.ones(8, device="meta")), TWO_DEVICES),
    "softcap as text": (lambda: flash_attention(Q, Q, Q, softcap="1"), "softcap must be a number"),
    "no softcap": (lambda: flash_attention(Q, Q, Q, softcap=None), "softcap must be a number"),
    "no longest": (
        lambda: flash_attention_varlen(*[PACKED] * 3, ENDS, ENDS, None, 4),
        "max_q must be an integer, got NoneType",
    ),
    "no dy": (lambda: layer_norm_backward(None, X), "dy must be a NumPy array or a torch tensor"),
    "temperature of NumPy": (
        lambda: softmax_topk(X, 1, temperature=np.ones(3)),
        "temperature and logits must both be NumPy arrays or both tensors",
    ),
    "temperature below float32": (
        lambda: softmax_topk(X, 1, temperature=1e-40),
        "temperature must be at least 1e-30, got 1e-40",
    ),
    "NaN weights": (lambda: ternarize(X * torch.nan), "w must be finite"),
    "ternary width": (lambda: TernaryLinear(0, 4), "in_features must be between 1 and"),
    "ternary group": (lambda: TernaryLinear(4, 4, group_size=0), "group_size must be between"),
    "ternary method": (lambda: TernaryLinear(4, 4, method="x"), "method must be one of absmean"),
    "one prompt": (
        lambda: beam_search(Uniform(), [1, 2], **RULES),
        r"got 1; write one prompt as \[\[5, 6\]\]",
    ),
    "no prompts": (
        lambda: beam_search(Uniform(), None, **RULES),
        "prompts must be a list of lists of token ids, got None",
    ),
    "a model of words": (
        lambda: beam_search(type("", (), {"log_probs": lambda *_: "x"})(), [[1]], **RULES),
        "log_probs must return an array of numbers",
    ),
    "a list beside tensors": (
        lambda: verify_tree(torch.tensor([1, 2]), [-1, 0], [1, 2, 3]),
        "all arrays must be torch tensors if one of them is, got list",
    ),
    "cache like a name": (lambda: KVCache("paged", **WIDE, like="cpu"), "like must be an array"),
    "calibration by name": (
        lambda: KVCache("paged_quantized", **WIDE, bits=4, calibration="x"),
        "calibration must be a Calibration, got 'x'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_with_a_sentence(case):
    call, sentence = REFUSED[case]
    with pytest.raises((DTypeError, RangeError), match=sentence):
        call()


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_rows_of_no_elements_have_an_empty_norm(norm):
    assert norm(torch.ones(2, 0)).shape == (2, 0)
    assert norm(torch.ones(2, 0), impl="torch").shape == (2, 0)


def test_meta_tensors_give_shapes():
    assert flash_attention(META, META, META, causal=True).device.type == "meta"
    assert scaled_dot_product_attention(META, META, META, is_causal=True).shape == Q.shape
    assert softmax_topk(X.to("meta"), 2).indices.shape == (3, 2)


def test_top_k_compiles_into_one_graph():
    compiled = torch.compile(lambda x: softmax_topk(x, 2), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X).indices, softmax_topk(X, 2).indices)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_prompts_of_a_beam_search_may_be_an_array(make):
    wanted = beam_search(Uniform(), [[1, 2], [3, 4]], **RULES)
    assert beam_search(Uniform(), make([[1, 2], [3, 4]]), **RULES) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_a_beam_search_may_return_recorded_tensors(dtype):
    class Recorded:
        def log_probs(self, prefixes):
            return torch.zeros(len(prefixes), 4, dtype=dtype, requires_grad=True).log_softmax(-1)

    (beams,) = beam_search(Recorded(), [[1]], **RULES)
    assert beams[0].score == pytest.approx(-np.log(4.0), rel=1e-2)
