"""The shape of a checkpoint for the memory calculator, from its `config.json` alone."""

from pathlib import Path

from trapline.gold.decoder.config import DecoderConfig, read_config
from trapline.gold.hub import local_config
from trapline.gold.kv_cache.shapes import ModelShape


def model_shape(model: str | Path) -> ModelShape:
    """The shape of a folder or of a Hub id, of which only `config.json` is downloaded."""
    config = read_config(local_config(model))
    sliding = sum(config.window_of(number) is not None for number in range(config.layers))
    active = parameters(config, active=True) / 1e9 if config.experts is not None else None
    return ModelShape(
        name=str(model),
        source=str(model),
        checked="its config.json",
        parameters=parameters(config) / 1e9,
        active=active,
        layers=config.layers,
        query_heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        sliding_layers=sliding,
        window=config.window or 0,
        context=config.context,
    )


def parameters(config: DecoderConfig, *, active: bool = False) -> int:
    """Number of weights, all or those that one token uses."""
    tables = 1 if config.tied else 2
    positions = config.context * config.dim if config.is_gpt2 else 0
    norm = 2 * config.dim if config.is_gpt2 else config.dim
    layers = sum(_layer(config, number, active) for number in range(config.layers))
    return tables * config.vocab * config.dim + positions + norm + layers


def _layer(config: DecoderConfig, number: int, active: bool) -> int:
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    total = config.dim * (2 * wide + 2 * narrow)
    total += (wide + 2 * narrow) * config.attention_bias + config.dim * config.out_bias
    total += 2 * config.head_dim * config.qk_norm
    norms = 4 if config.is_gpt2 or config.post_norms else 2  # a layer norm has two vectors
    total += norms * config.dim
    products = 2 if config.is_gpt2 else 3
    experts = config.experts_of(number)
    if experts is not None:
        count = experts.per_token if active else experts.count
        return total + config.dim * experts.count + count * products * config.dim * experts.hidden
    biases = (products - 1) * config.hidden + config.dim
    return total + products * config.dim * config.hidden + biases * config.mlp_bias
