"""Small random decoders shared by the tests of this component."""

import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.errors import RangeError

SIZES = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
FAMILIES = {
    "llama": {**SIZES, "model_type": "llama"},
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 5, "head_dim": 6},
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {**GPT2, "model_type": "gpt2"},
    "qwen2": {**SIZES, "model_type": "qwen2"},
    "gemma3_text": {
        **SIZES,
        "model_type": "gemma3_text",
        "head_dim": 6,
        "query_pre_attn_scalar": 10,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 4.0,
    },
    "gemma2": {
        **SIZES,
        "model_type": "gemma2",
        "head_dim": 6,
        "query_pre_attn_scalar": 10,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
    "phi3": {**SIZES, "model_type": "phi3"},
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 5},
    "qwen3_moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "mlp_only_layers": [0],
    },
}
#: One of each kind of layer; the others differ in names and biases only.
KINDS = ["llama", "mistral", "qwen3", "gpt2", "gemma2"]


def random_decoder(family: str, **changes) -> Decoder:
    """Weights large enough that every part of the model matters."""
    torch.manual_seed(7)
    decoder = Decoder(from_dict({**FAMILIES[family], **changes})).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return decoder.requires_grad_(False)


@pytest.fixture
def families():
    """Small configurations of all families."""
    return FAMILIES


@pytest.fixture
def make():
    return random_decoder


@pytest.fixture(params=KINDS)
def decoder(request):
    """One of each kind."""
    return random_decoder(request.param)


@pytest.fixture
def same_beams():
    """Checks that two searches find the same tokens, with scores that are close."""

    def check(found, expected):
        for ours, theirs in zip(found, expected, strict=True):
            assert [beam.tokens for beam in ours] == [beam.tokens for beam in theirs]
            for one, other in zip(ours, theirs, strict=True):
                assert one.score == pytest.approx(other.score, rel=1e-5)

    return check


@pytest.fixture
def to_the_end():
    """Runs an engine: the tokens of each request, and the errors that steps raised."""

    def run(engine, steps=40):
        said, sentences = {}, []
        for _ in range(steps):
            if not engine.is_busy:
                break
            try:
                for token in engine.step():
                    said.setdefault(token.request, []).append(token.token)
            except RangeError as error:
                sentences.append(str(error))
        assert not engine.is_busy
        assert engine.pool.book.free_pages == engine.pool.book.num_pages
        return said, sentences

    return run
