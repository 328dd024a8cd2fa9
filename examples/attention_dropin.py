"""Attention in place of torch's function, and inside a model of Hugging Face transformers.

python examples/attention_dropin.py
"""

import copy
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as torchs

from trapline.gold import scaled_dot_product_attention
from trapline.gold.errors import UnsupportedError


def in_place_of_torch() -> None:
    """torch's arguments mean what they mean in torch, also when T ≠ S."""
    torch.manual_seed(0)
    print("     T    S  largest difference from torch")
    for queries, keys in ((40, 40), (10, 40), (40, 10)):
        q = torch.randn(2, 8, queries, 32)
        k, v = torch.randn(2, 2, 2, keys, 32)
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        ours = scaled_dot_product_attention(q, k, v, **options)
        difference = (ours - torchs(q, k, v, **options)).abs().max()
        print(f"  {queries:4} {keys:4}  {float(difference):.1e}")
    try:
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(40, 10, dtype=torch.bool))
    except UnsupportedError as error:
        print(f"refused: {error}")


def in_a_model() -> None:
    """A small random Mistral: grouped heads, a sliding window, and a padded batch."""
    from transformers import MistralConfig, MistralForCausalLM

    from trapline.gold.attention.huggingface import register

    register()
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 16}
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    plain = MistralForCausalLM(
        MistralConfig(**sizes, **heads, pad_token_id=0, eos_token_id=None)
    ).eval()
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("trapline")  # or attn_implementation="trapline" when loading
    ids, mask = torch.randint(1, 64, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[0, :9] = 0  # a shorter prompt, padded on the left
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    first, second = (model.generate(ids, **given)[:, 24:] for model in (plain, ours))
    print("generated:", " ".join(f"{token:2}" for token in second[0].tolist()))
    print("the same tokens as with transformers' attention:", bool(torch.equal(first, second)))


if __name__ == "__main__":
    in_place_of_torch()
    in_a_model()
