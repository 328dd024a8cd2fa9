"""The decoder as a target: a tree's logits, what a commit leaves, and whole answers."""

import numpy as np
import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import from_dict
from trapline.gold.decoder.generate import generate as plain
from trapline.gold.decoder.pool import Pool
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding import oracle, reference
from trapline.gold.tree_decoding.decoder_target import DecoderTarget
from trapline.gold.tree_decoding.generate import Row, Trees, generate
from trapline.gold.tree_decoding.prompt_lookup import PromptLookup, lookup

SIZES = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 19, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64}
FAMILIES = {
    "llama": {**SIZES, "model_type": "llama"},
    "mistral": {**SIZES, "model_type": "mistral", "sliding_window": 5},
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {**GPT2, "model_type": "gpt2"},
}
ON_A_GPU = pytest.mark.needs_gpu


def random_decoder(family):
    generator = torch.Generator().manual_seed(3)
    decoder = Decoder(from_dict(FAMILIES[family])).eval().requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return decoder


def random_trees(rng, rows, nodes, vocab):
    parents = np.array([[rng.integers(-1, n) for n in range(nodes)] for _ in range(rows)])
    tokens = torch.tensor(rng.integers(0, vocab, (rows, nodes)))
    return tokens, torch.tensor(parents)


def opened(decoder, prompts, layers=()):
    target = DecoderTarget(decoder, layers)
    rows = [Row(number, list(prompt), len(prompt)) for number, prompt in enumerate(prompts)]
    target.open(rows)
    return target, rows


def ask(target, rows, tokens, parents):
    roots = torch.tensor([[row.tokens[-1]] for row in rows])
    seen = reference.ancestors(parents)
    trees = Trees(torch.cat((roots, tokens), dim=1), reference.depths(seen), seen)
    return target.verify(rows, trees)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_node_logits_match_a_plain_forward_over_the_path(family):
    decoder = random_decoder(family)
    rng = np.random.default_rng(0)
    prompts = [[4], [7, 2, 9, 1, 0, 3, 3, 8], [5, 6, 1]]
    target, rows = opened(decoder, prompts)
    tokens, parents = random_trees(rng, 3, 9, 19)
    logits = ask(target, rows, tokens, parents)
    for i, prompt in enumerate(prompts):
        for node in range(-1, 9):
            branch = oracle.ancestors(parents[i].tolist(), node)
            text = torch.tensor([[*prompt, *tokens[i][branch].tolist()]])
            want = decoder(text)[0, -1]
            torch.testing.assert_close(logits[i, node + 1], want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_logits_after_a_commit_match_a_fresh_prefill(family, seed):
    """Random trees, random branches of them, three rounds in a row."""
    decoder = random_decoder(family)
    rng = np.random.default_rng(seed)
    target, rows = opened(decoder, [[4], [7, 2, 9, 1]], layers=(0, 2))
    for _ in range(3):
        tokens, parents = random_trees(rng, 2, 7, 19)
        ask(target, rows, tokens, parents)
        paths = [oracle.ancestors(own.tolist(), int(rng.integers(-1, 7))) for own in parents]
        target.commit(rows, paths)
        for row, path, own in zip(rows, paths, tokens, strict=True):
            row.tokens += [*own[path].tolist(), int(rng.integers(19))]
            assert row.target.length == len(row.tokens) - 1
    logits = ask(target, rows, *random_trees(rng, 2, 1, 19))
    for i, row in enumerate(rows):
        text = torch.tensor([row.tokens])
        torch.testing.assert_close(logits[i, 0], decoder(text)[0, -1], atol=1e-5, rtol=1e-5)
        # What the drafter gets to see is the outputs of the layers it names, token by token.
        run = decoder.run(list(text[:, :-1]), [decoder.new_cache()], features=(0, 2))
        fresh = torch.cat(row.fresh)
        torch.testing.assert_close(fresh, torch.cat(run.features, dim=-1), atol=1e-5, rtol=1e-5)


def test_features_are_outputs_of_the_named_layers():
    """Counted from 0, without the embedding: a hook on the layer sees the same."""
    decoder = random_decoder("llama")
    heard = []
    decoder.layers[1].register_forward_hook(lambda module, args, out: heard.append(out))
    _, (row,) = opened(decoder, [[1, 2, 3]], layers=(1,))
    assert torch.equal(row.fresh[0], heard[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_plain_decoding(family, mode, device):
    """Of a CPU. Each row has a cache of its own, and a tree's mask reads it as it lies."""
    decoder = random_decoder(family)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 19, int(rng.integers(1, 12))).tolist() for _ in range(6)]
    want = plain(decoder, prompts, max_new_tokens=20, stop_ids=[3])
    done = generate(
        DecoderTarget(decoder.to(device)),
        PromptLookup(19, block=4, device=device),
        prompts,
        max_new_tokens=20,
        stop_ids=[3],
        mode=mode,
        budget=6,
        batch=4,
    )
    assert done.tokens == want


def test_pages_of_a_pool_work_and_are_freed():
    decoder = random_decoder("llama")
    pool = Pool(decoder.config, 40, 4, torch.float32, torch.device("cpu"))
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, 19, int(rng.integers(1, 12))).tolist() for _ in range(5)]
    done = generate(
        DecoderTarget(decoder, new_cache=pool.open),
        PromptLookup(19, block=4),
        prompts,
        max_new_tokens=16,
        budget=6,
        batch=3,
    )
    assert done.tokens == plain(decoder, prompts, max_new_tokens=16)
    assert pool.book.free_pages == 40


@torch.no_grad()
def test_keeping_a_path_copies_shared_pages():
    decoder = random_decoder("llama")
    pool = Pool(decoder.config, 12, 4, torch.float32, torch.device("cpu"))
    first = pool.open()
    decoder.run([[1, 2, 3, 4, 5, 6]], [first])
    before = pool.keys[0][first.slots(0, 6)].clone()
    twin = first.fork()
    twin.keep([0, 1, 5, 3])
    assert torch.equal(pool.keys[0][first.slots(0, 6)], before)
    assert torch.equal(pool.keys[0][twin.slots(0, 4)], before[[0, 1, 5, 3]])
    assert twin.length == 4
    with pytest.raises(RangeError, match="distinct"):
        twin.keep([1, 1])
    for sequence in (first, twin):
        sequence.free()
    assert pool.book.free_pages == 12


def test_answer_may_fill_the_context():
    decoder = random_decoder("llama")
    done = generate(DecoderTarget(decoder), PromptLookup(19), [[1] * 50], max_new_tokens=14)
    assert done.tokens == plain(decoder, [[1] * 50], max_new_tokens=14)


def test_lookup_continues_the_latest_occurrence_of_the_longest_ending():
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2, 3]
    assert lookup(text, 2, 3) == [9, 2]  # after 1 2 3
    assert lookup(text, 9, 2) == [8, 1, 2, 3]  # after the latest 2 3
    assert lookup([1, 2, 3], 4, 3) == []
    assert lookup([5], 4, 3) == []
    assert lookup([5, 5], 4, 3) == [5]
