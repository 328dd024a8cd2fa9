"""A small decoder with random weights, for the other examples."""

import torch

from trapline.gold import Decoder
from trapline.gold.decoder.config import from_dict

VOCABULARY = 64


def small_decoder(**changes: object) -> Decoder:
    """Llama-shaped, two layers, the same weights every time."""
    torch.manual_seed(0)
    settings = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        **changes,
    }
    decoder = Decoder(from_dict(settings)).eval().requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.25)
    return decoder
