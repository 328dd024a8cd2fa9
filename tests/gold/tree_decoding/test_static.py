"""Rounds of fixed size: the same answers as plain decoding, and what they refuse."""

import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.generate import generate as plain
from trapline.gold.errors import RangeError, UnsupportedError
from trapline.gold.tree_decoding.decoder_target import DecoderTarget
from trapline.gold.tree_decoding.drafter import DFlashDrafter, drafter_config
from trapline.gold.tree_decoding.drafter_static import StaticDFlash, StaticLookup
from trapline.gold.tree_decoding.generate import generate
from trapline.gold.tree_decoding.generate_graphs import StaticGenerator
from trapline.gold.tree_decoding.generate_static import StaticConfig
from trapline.gold.tree_decoding.prompt_lookup import PromptLookup
from trapline.gold.tree_decoding.training import fresh

SIZES = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}


def random_pair(family, **changes):
    generator = torch.Generator().manual_seed(3)
    config = from_dict({**SIZES, "model_type": family, **changes})
    target = Decoder(config).eval().requires_grad_(False)
    for parameter in target.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return target, fresh(drafter_config(config, layers=2, block=5, mask_id=11), 0).eval()


PROMPTS = [[1], [4, 2, 9, 3, 0, 7], [5, 5, 8]]


def static_drafter(kind, target, model, budget, rows=3, room=64):
    if kind == "lookup":
        return StaticLookup(rows, room, block=budget, device="cpu")
    if kind is None:
        return None
    return StaticDFlash(model, target, rows, room, budget=budget, chain=kind == "chain")


@pytest.mark.parametrize(
    ("family", "kind", "budget"),
    [
        ("llama", "chain", 4),
        ("llama", "tree", 9),
        ("llama", "lookup", 3),
        ("llama", None, 0),
        ("qwen3", "chain", 2),
        ("qwen3", "tree", 5),
    ],
)
def test_answers_are_those_of_plain_decoding(family, kind, budget):
    """However it is drafted, or not at all: twice, the second time over used caches."""
    target, model = random_pair(family)
    drafter = static_drafter(kind, target, model, budget)
    rounds = StaticGenerator(target, drafter, StaticConfig(rows=3, room=64))
    for prompts in (PROMPTS, PROMPTS[::-1]):
        done = rounds.generate(prompts, max_new_tokens=14, stop_ids=[10])
        assert done.tokens == plain(target, prompts, max_new_tokens=14, stop_ids=[10])
    if kind is None:
        assert done.statistics.tau == 1.0


@pytest.mark.parametrize("kind", ["chain", "tree", "lookup"])
def test_static_drafters_draft_what_the_others_draft(kind):
    target, model = random_pair("llama")
    drafter = static_drafter(kind, target, model, 4)
    config = StaticConfig(rows=3, room=64)
    static = StaticGenerator(target, drafter, config).generate(PROMPTS, max_new_tokens=20)
    other = PromptLookup(12, block=4) if kind == "lookup" else DFlashDrafter(model, target)
    done = generate(
        DecoderTarget(target, other.target_layers),
        other,
        PROMPTS,
        max_new_tokens=20,
        mode="tree" if kind == "tree" else "chain",
        budget=4,
    )
    assert static.tokens == done.tokens
    # The other loop drafts less deep near the length limit; no pass comes of it.
    assert static.statistics.passes == done.statistics.passes


def test_sampling_has_the_same_text_with_and_without_a_drafter():
    target, model = random_pair("llama")
    config = StaticConfig(rows=3, room=64, temperature=1.3, seed=5)
    texts = []
    for kind in (None, "tree"):
        rounds = StaticGenerator(target, static_drafter(kind, target, model, 8), config)
        texts.append(rounds.generate(PROMPTS, max_new_tokens=15).tokens)
    assert texts[0] == texts[1]
    assert len({tuple(answer) for answer in texts[0]}) == 3


def test_bad_input_is_refused_by_name():
    target, model = random_pair("llama")
    sliding, _ = random_pair("mistral", sliding_window=4)
    with pytest.raises(UnsupportedError, match="window"):
        StaticGenerator(sliding, None, StaticConfig(rows=1, room=64))
    with pytest.raises(RangeError, match="budget"):
        static_drafter("tree", target, model, 0)
    with pytest.raises(RangeError, match="room for 97"):
        StaticGenerator(target, None, StaticConfig(rows=1, room=97))
    drafter = static_drafter("tree", target, model, 4, rows=1, room=40)
    rounds = StaticGenerator(target, drafter, StaticConfig(rows=1, room=40))
    with pytest.raises(RangeError, match="2 prompts for 1 rows"):
        rounds.generate([[1], [2]], max_new_tokens=2)
    with pytest.raises(RangeError, match="room for 41"):
        rounds.generate([[1]], max_new_tokens=36)
    with pytest.raises(RangeError, match="mask id"):
        rounds.generate([[11]], max_new_tokens=2)
    with pytest.raises(RangeError, match="empty"):
        rounds.generate([[]], max_new_tokens=2)
