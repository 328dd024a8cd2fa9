"""One clear sentence for frequent mistakes: what was given, what is accepted, what to do."""

import inspect
import re

import numpy as np
import pytest

import trapline.gold as gold
from trapline.gold import impl
from trapline.gold.errors import DTypeError, UnsupportedError

torch = pytest.importorskip("torch")


@pytest.fixture
def decoder():
    from trapline.gold.decoder.config import DecoderConfig
    from trapline.gold.decoder.rope_config import RopeConfig

    torch.manual_seed(0)
    sizes = {"vocab": 11, "dim": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4}
    sizes |= {"hidden": 16, "context": 32}
    rope = RopeConfig(theta=10000.0)
    config = DecoderConfig("llama", **sizes, norm_eps=1e-5, tied=True, rope=rope)
    return gold.Decoder(config).requires_grad_(False)


ROWS = torch.randn(2, 8)
HEADS = torch.randn(1, 1, 2, 8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gold.layer_norm(ROWS, impl="kernels"),
        lambda: gold.rms_norm(ROWS, impl="kernels"),
        lambda: gold.layer_norm_backward(ROWS, ROWS, impl="kernels"),
        lambda: gold.softmax_topk(ROWS, 2, impl="kernels"),
        lambda: gold.flash_attention(HEADS, HEADS, HEADS, impl="kernels"),
    ],
)
def test_kernels_on_cpu_tensors(call):
    with pytest.raises(UnsupportedError, match="needs CUDA tensors, got tensors on cpu; use impl="):
        call()


@pytest.mark.parametrize("logits", [ROWS, ROWS.numpy()], ids=["tensor", "array"])
def test_temperature_as_a_list(logits):
    with pytest.raises(DTypeError, match=r"a number or an array .* got \[1.0, 2.0\]"):
        gold.softmax_topk(logits, 2, temperature=[1.0, 2.0])
    with pytest.raises(DTypeError, match="temperature must be a number, got 'hot'"):
        gold.softmax_topk(logits, 2, temperature="hot")


def test_sampling_as_a_number(decoder):
    with pytest.raises(DTypeError, match=r"sampling must be a Sampling or a list .* got 1.0"):
        decoder.generate([5, 6], max_new_tokens=2, sampling=1.0)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([5, 6], r"prompt 0 must be a list of token ids, got 5; write one prompt as \[\[5, 6\]\]"),
        (5, "prompts must be a list of lists of token ids, got 5"),
        ("abc", "prompts must be a list of lists of token ids, got 'abc'; Decoder.generate takes"),
        (["abc"], "prompt 0 must be a list of token ids, got 'abc'"),
    ],
)
def test_prompts_that_are_not_lists_of_token_ids(decoder, prompts, message):
    with pytest.raises(DTypeError, match=message):
        gold.generate(decoder, prompts, max_new_tokens=2)


def test_beam_search_of_something_else_than_a_model(decoder):
    options = {"beam_width": 2, "max_new_tokens": 2, "eos_id": 1}
    with pytest.raises(DTypeError, match=r"with log_probs\(prefixes\), .* got function"):
        gold.beam_search(lambda prefixes: np.zeros((len(prefixes), 3)), [[1]], **options)
    with pytest.raises(DTypeError, match=r"got Decoder; .* decoder.generate\(…, beams=n\)"):
        gold.beam_search(decoder, [[1]], **options)


def test_options_of_other_libraries_are_named_with_ours(decoder):
    with pytest.raises(TypeError, match=r"Decoder.generate has no option 'num_return_sequences'; "):
        decoder.generate([[5, 6]], max_new_tokens=2, num_return_sequences=2)
    with pytest.raises(TypeError, match="generate has no option 'temperature'; give sampling="):
        gold.generate(decoder, [[5, 6]], max_new_tokens=2, temperature=1.0)
    with pytest.raises(TypeError, match=r"beam_search has no option 'num_return_.*n_best=n"):
        gold.beam_search(
            *(decoder, [[1]]), beam_width=2, max_new_tokens=2, eos_id=1, num_return_sequences=2
        )
    with pytest.raises(TypeError, match=r"generate has no option 'colour'$"):
        gold.generate(decoder, [[5, 6]], max_new_tokens=2, colour="red")


def test_table_of_implementations_is_complete():
    """The table in `trapline.gold.impl` names every function with `impl=` and what it offers."""
    listed = {}
    for names, offered in re.findall(r"^\| ([a-z_, ]+) \| ([a-z, ]+) \|$", impl.__doc__, re.M):
        if names != "function":
            listed |= {name: tuple(offered.split(", ")) for name in names.split(", ")}
    public = {name: getattr(gold, name) for name in gold.__all__}
    taking = {
        name: function
        for name, function in public.items()
        if inspect.isfunction(function) and "impl" in inspect.signature(function).parameters
    }
    assert set(listed) == set(taking)
    for name, function in taking.items():
        constant = "_APPENDED_BY" if name == "paged_append" else "_OFFERED"
        assert listed[name] == getattr(inspect.getmodule(function), constant)
