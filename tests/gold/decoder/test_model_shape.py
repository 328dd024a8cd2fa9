"""The shape of a checkpoint by its configuration alone."""

import dataclasses
import json

import pytest
import torch

from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.model_shape import model_shape, parameters
from trapline.gold.decoder.network import Network


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True, "mlp_bias": True}]
)
def test_weights_are_counted_as_a_model_has_them(families, changes):
    for raw in families.values():
        config = from_dict({**raw, **changes})
        with torch.device("meta"):
            network = Network(config)
        assert parameters(config) == sum(one.numel() for one in network.parameters())


def test_shape_of_a_folder(families, tmp_path):
    raw = {**families["gemma3_text"], "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape = model_shape(tmp_path)
    assert (shape.layers, shape.sliding_layers, shape.window, shape.kv_heads) == (6, 3, 5, 2)
    assert shape.active is None
    experts = {**families["mixtral"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    shape = model_shape(tmp_path)
    # Three of the five experts rest; each has three matrices of 16 × 24.
    assert round((shape.parameters - shape.active) * 1e9) == 3 * 3 * 16 * 24
    assert dataclasses.asdict(shape)["source"] == str(tmp_path)
