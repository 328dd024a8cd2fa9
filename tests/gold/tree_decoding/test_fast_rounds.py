"""Fast rounds: kernels in the interpreter, compiled for Hopper, and whole answers on a GPU."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.generate import generate as plain
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.errors import UnsupportedError
from trapline.gold.tree_decoding.decoder_target import DecoderTarget
from trapline.gold.tree_decoding.drafter import DFlashDrafter, drafter_config
from trapline.gold.tree_decoding.generate import generate
from trapline.gold.tree_decoding.prompt_lookup import PromptLookup
from trapline.gold.tree_decoding.training import fresh, regenerate_in_bulk

pytest.importorskip("triton")
HERE = Path(__file__).parent
FULL = pytest.mark.full
on_a_gpu = pytest.mark.needs_gpu


def gpu(*cases):
    return [pytest.param(*case, marks=on_a_gpu) for case in cases]


def test_interpreted_kernels_match_torch(tmp_path, run_script):
    run_script(HERE / "interpret_rounds.py", tmp_path, TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "rounds.json").read_text())
    assert all(found["verdict"])
    assert len(found["verdict"]) == 24
    assert found["prepare"]
    assert found["nothing"]
    assert found["move"]
    assert found["draw"]
    assert found["answers"] == [True] * 3
    assert found["lookup"]
    assert max(found["attend"]) < 2e-6
    assert found["begin"] < 2e-5
    assert found["large"] < 2e-4


@pytest.mark.parametrize(("which", "count"), [("few", 3), pytest.param("all", 32, marks=FULL)])
def test_kernels_compile_for_hopper(tmp_path, run_script, which, count):
    run_script(HERE / "compile_rounds.py", tmp_path, TRITON_INTERPRET="0", KERNELS=which)
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert len(compiled) == count
    assert all(entry["shared"] <= 232448 for entry in compiled)


def test_weights_are_joined_once():
    from trapline.gold.decoder.joined_layer import join_weights

    parts = [torch.nn.Linear(4, size, bias=False) for size in (3, 2, 5)]
    wanted = torch.cat([part.weight.detach() for part in parts])
    first, second = join_weights(*parts), join_weights(*parts)
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted)
    assert first.data_ptr() == second.data_ptr() == parts[0].weight.data_ptr()
    other = join_weights(parts[0], parts[2])
    assert torch.equal(other, torch.cat((wanted[:3], wanted[5:])))


def models(dtype, layers=4, device="cuda", **changes):
    shape = {"dim": 384, "heads": 6, "kv_heads": 3, "head_dim": 64, "hidden": 1024, **changes}
    config = DecoderConfig(
        family="qwen3",
        vocab=2048,
        layers=layers,
        context=1024,
        norm_eps=1e-6,
        **{"tied": True, "rope": RopeConfig(), "qk_norm": True, **shape},
    )
    torch.manual_seed(1)
    target = Decoder(config).to(device)
    for parameter in target.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.05)
    sizes = {"layers": 2, "block": 8, "mask_id": 2047, "seen": 3, "hidden": 2048}
    model = fresh(drafter_config(config, **sizes), 0).to(device)
    return (one.to(dtype).eval().requires_grad_(False) for one in (target, model))


def prompts_for(rows, least=20):
    luck = torch.Generator().manual_seed(rows)
    sizes = [least + 7 * row for row in range(rows)]
    return [torch.randint(0, 2000, (size,), generator=luck).tolist() for size in sizes]


def fast(kind, target, model, rows, budget, room=256, *, sampled=False):
    from trapline.gold.tree_decoding.fast_drafters import FusedDFlash, FusedLookup
    from trapline.gold.tree_decoding.fast_generate import FastGenerator
    from trapline.gold.tree_decoding.fast_rounds import RoundsConfig

    drafter = None
    if kind == "lookup":
        drafter = FusedLookup(block=budget)
    elif kind is not None:
        drafter = FusedDFlash(model, target, rows, room, budget=budget, chain=kind == "chain")
    return FastGenerator(target, drafter, RoundsConfig(rows, room, sampled))


def warm(count, temperature=1.0):
    return [Sampling(temperature=temperature, seed=3 + number) for number in range(count)]


def readable(kind, target, model, prompts, budget, **options):
    """The readable loop with the same drafter."""
    drafter = DFlashDrafter(model, target)
    if kind == "lookup":
        drafter = PromptLookup(target.config.vocab, block=budget, device=target.device)
    return generate(
        DecoderTarget(target, drafter.target_layers),
        drafter,
        prompts,
        mode="tree" if kind == "tree" else "chain",
        budget=budget,
        **options,
    )


@pytest.mark.parametrize(
    ("kind", "rows", "budget"),
    gpu(
        (None, 1, 0),
        (None, 5, 0),
        ("lookup", 3, 7),
        ("chain", 1, 7),
        ("chain", 4, 7),
        ("chain", 2, 3),
        ("tree", 1, 5),
        ("tree", 3, 16),
        ("tree", 2, 40),
        ("tree", 2, 100),
    ),
)
def test_float32_answers_equal_plain_decoding(kind, rows, budget):
    """Twice, the second time over used caches; with as many passes as the readable loop."""
    target, model = models(torch.float32)
    prompts = prompts_for(rows)
    wanted = plain(target, prompts, max_new_tokens=40, stop_ids=[11], batch=rows)
    rounds = fast(kind, target, model, rows, budget, room=384)
    for _ in range(2):
        done = rounds.generate(prompts, max_new_tokens=40, stop_ids=[11])
        assert done.tokens == wanted
    if kind is not None:
        options = {"max_new_tokens": 40, "stop_ids": [11]}
        other = readable(kind, target, model, prompts, budget, **options)
        assert done.statistics.passes == other.statistics.passes


@pytest.mark.parametrize(("kind", "budget"), gpu((None, 0), ("chain", 7), ("tree", 15)))
def test_prompts_wait_for_a_free_row(kind, budget):
    """Answers, sampled ones too, depend neither on the row nor on its previous prompts."""
    target, model = models(torch.float32)
    prompts = prompts_for(7)
    wanted = plain(target, prompts, max_new_tokens=20, stop_ids=[11], batch=7)
    rounds = fast(kind, target, model, 2, budget)
    assert rounds.generate(prompts, max_new_tokens=20, stop_ids=[11]).tokens == wanted
    options = {"max_new_tokens": 20, "sampling": warm(7)}
    all_at_once = fast(None, target, model, 7, 0, sampled=True)
    two_at_a_time = fast(kind, target, model, 2, budget, sampled=True)
    drawn = all_at_once.generate(prompts, **options).tokens
    assert two_at_a_time.generate(prompts, **options).tokens == drawn


@pytest.mark.parametrize(("kind", "budget"), gpu(("chain", 7), ("tree", 24)))
def test_sampled_text_is_the_same_with_and_without_a_drafter(kind, budget):
    target, model = models(torch.float32)
    prompts = prompts_for(2)
    options = {"max_new_tokens": 48, "sampling": warm(2)}
    wanted = fast(None, target, model, 2, 0, sampled=True).generate(prompts, **options)
    found = fast(kind, target, model, 2, budget, sampled=True).generate(prompts, **options)
    assert found.tokens == wanted.tokens


@pytest.mark.parametrize("kind", gpu(("chain",), ("tree",)))
def test_greedy_rows_in_a_sampled_batch_equal_plain_decoding(kind):
    target, model = models(torch.float32)
    prompts = prompts_for(3)
    wanted = plain(target, prompts, max_new_tokens=30, batch=3)
    ways = [Sampling(), Sampling(temperature=0.7, seed=1), Sampling()]
    rounds = fast(kind, target, model, 3, 7, sampled=True)
    found = rounds.generate(prompts, max_new_tokens=30, sampling=ways).tokens
    assert (found[0], found[2]) == (wanted[0], wanted[2])
    assert found[1] != wanted[1]


@pytest.mark.parametrize("kind", gpu(("chain",), ("tree",)))
def test_large_products_give_the_same_answers(kind, monkeypatch):
    """The cuBLAS path of large models, with a small float32 model."""
    from trapline.gold.tree_decoding.hopper import linear_many_rows

    target, model = models(torch.float32)
    prompts = prompts_for(3)
    wanted = plain(target, prompts, max_new_tokens=30, batch=3)
    monkeypatch.setattr(linear_many_rows, "LARGE", 1)
    rounds = fast(kind, target, model, 3, 7 if kind == "chain" else 12)
    assert rounds.rounds.verifier.uses_cublas
    assert rounds.generate(prompts, max_new_tokens=30).tokens == wanted


@pytest.mark.parametrize("kind", gpu((None,), ("chain",), ("tree",)))
def test_bfloat16_answers_begin_like_plain_decoding(kind):
    """Nearly equal logits may swap; most tokens come before the first swap."""
    target, model = models(torch.bfloat16, layers=2)
    prompts = prompts_for(8)
    wanted = plain(target, prompts, max_new_tokens=24, batch=8)
    done = fast(kind, target, model, 8, 7 if kind == "chain" else 16)
    found = done.generate(prompts, max_new_tokens=24).tokens
    same = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), 24)
        for a, b in zip(found, wanted, strict=True)
    ]
    assert sum(same) >= 0.5 * 24 * 8


@pytest.mark.parametrize(
    ("kind", "budget", "rows"), gpu(("chain", 7, 3), ("chain", 7, 8), ("tree", 14, 8))
)
def test_hopper_products_match_the_step_kernels(kind, budget, rows, monkeypatch):
    """The same logits, features and drafts as by the other kernels; 24, 64 and 120 lines."""
    from trapline.gold.tree_decoding.hopper import linear_many_rows
    from trapline.gold.tree_decoding.tree_pass import TreePositions

    target, model = models(torch.bfloat16, layers=2, hidden=2048 + 32)
    found = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(linear_many_rows, "LARGE", least)
        rounds = fast(kind, target, model, rows, budget).rounds
        assert (rounds.verifier._large is not None) == (least == 1)
        rounds.open(prompts_for(rows), 0)
        rounds.drafter.propose(rounds.state, rounds.proposal)
        drafted = rounds.drafter._pass.lines.clone()
        rounds.proposal.ids.copy_(torch.arange(len(rounds.proposal.ids)) * 7)
        made, lengths = rounds.proposal, rounds.state.lengths
        tiles = rounds.verifier.run(
            made.ids, TreePositions(lengths, made.depths * 0, made.seen * 0 + 1)
        )
        rounds.choose(tiles)
        assert torch.equal(rounds.choices, rounds.verifier.lines.argmax(dim=-1))
        found.append((rounds.verifier.lines.clone(), rounds.verifier.features.clone(), drafted))
    for ours, others in zip(*found, strict=True):
        assert (ours - others).norm() < 0.03 * others.norm()


def passed(target, prompts, made, layers):
    """Logits and features of trees behind prompts, by the decoder itself on a CPU, in float32."""
    target = copy.deepcopy(target).float().cpu()
    caches = [target.new_cache() for _ in prompts]
    target.run([prompt[:-1] for prompt in prompts], caches)
    ids, depths = (part.view(-1, made.nodes).cpu() for part in (made.ids, made.depths))
    run = target.run(
        ids,
        caches,
        positions=[cache.length + depth for cache, depth in zip(caches, depths, strict=True)],
        masks=[
            torch.nn.functional.pad(seen, (cache.length, 0), value=True)
            for cache, seen in zip(caches, made.seen.cpu() != 0, strict=True)
        ],
        features=layers,
    )
    return target.logits(run.last), torch.cat(run.features, dim=-1)


def test_decoder_pass_over_a_tree_equals_plain_passes_over_its_branches():
    """`passed` is the reference of the GPU tests below."""
    from trapline.gold.tree_decoding import reference
    from trapline.gold.tree_decoding.fast_drafters import Proposal

    shape = {"dim": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 96}
    target, _ = models(torch.float32, layers=2, device="cpu", **shape)
    prompts, made = prompts_for(2, 5), Proposal(2, 6, torch.device("cpu"))
    seen = reference.ancestors(torch.tensor([[-1, 0, 0, -1, 2], [-1, -1, 1, 2, 1]]))
    made.ids.copy_(torch.arange(12) * 7)
    made.seen.copy_(seen)
    made.depths.copy_(reference.depths(seen).flatten())
    logits, features = (part.view(2, 6, -1) for part in passed(target, prompts, made, (0, 1)))
    for row, node in torch.cartesian_prod(torch.arange(2), torch.arange(6)).tolist():
        branch = made.ids.view(2, 6)[row][seen[row, node]].tolist()
        run = target.run([prompts[row][:-1] + branch], [target.new_cache()], features=(0, 1))
        wanted = target.logits(run.last[-1]), torch.cat([part[-1] for part in run.features])
        torch.testing.assert_close((logits[row, node], features[row, node]), wanted)


@pytest.mark.parametrize(
    ("kind", "budget", "dtype", "most"),
    gpu(
        ("chain", 7, torch.bfloat16, 0.02),
        ("tree", 15, torch.bfloat16, 0.02),
        ("tree", 15, torch.float32, 1e-3),
    ),
)
def test_wide_heads_see_several_tiles_of_keys(kind, budget, dtype, most, monkeypatch):
    """Heads of the 8B shape behind 130 to 179 positions, in passes over 64 and 128 lines.

    In bfloat16 these are two tiles of 128 and three of 64. Rounding alone gives 0.010; a masked key
    would give 0.12, and a visible sibling 0.026.
    """
    from trapline.gold.tree_decoding.hopper import linear_many_rows
    from trapline.gold.tree_decoding.tree_pass import TreePositions

    shape = {"dim": 1024, "heads": 32, "kv_heads": 8, "head_dim": 128, "hidden": 2048 + 32}
    target, model = models(dtype, layers=2, **shape)
    prompts = prompts_for(8, 131)
    monkeypatch.setattr(linear_many_rows, "LARGE", 1)
    rounds = fast(kind, target, model, 8, budget).rounds
    assert (rounds.verifier._large is not None) == (dtype == torch.bfloat16)
    rounds.open(prompts, 0)
    rounds.drafter.propose(rounds.state, rounds.proposal)
    made, lengths = rounds.proposal, rounds.state.lengths
    rounds.choose(rounds.verifier.run(made.ids, TreePositions(lengths, made.depths, made.seen)))
    ours = rounds.verifier.lines, rounds.verifier.features
    assert torch.equal(rounds.choices, ours[0].argmax(dim=-1))
    wanted = passed(target, prompts, made, rounds.target_layers)
    for mine, other in zip(ours, wanted, strict=True):
        assert (mine.cpu() - other).norm() < most * other.norm()


@pytest.mark.parametrize(("lines", "boxed"), [(64, False), (65, True), (128, True)])
def test_copy_engine_serves_qkv_of_many_lines(lines, boxed):
    from trapline.gold.decoder.tile_config import uses_tma
    from trapline.gold.tree_decoding.hopper.linear_many_rows import tile_config

    weights = torch.empty((6144, 4096), dtype=torch.bfloat16, device="meta")
    assert uses_tma("normed_linear", tile_config("normed_linear", lines, 6144), weights) == boxed


@pytest.mark.parametrize("part", ["attention_bias", "mlp_bias"])
def test_targets_with_biases_are_rejected(part):
    """The kernels of a pass ignore biases, so logits would be wrong."""
    from trapline.gold.tree_decoding.fast_rounds import FusedRounds, RoundsConfig

    config = DecoderConfig(
        family="llama", vocab=64, dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, hidden=64,
        context=64, norm_eps=1e-6, tied=True, rope=RopeConfig(), **{part: True},
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="biases"):
        FusedRounds(Decoder(config), None, RoundsConfig(1, 64))


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"lines": 16}, False),
        ({"lines": 129}, False),
        ({"kind": torch.float32}, False),
        ({"kind": torch.float16}, False),
        ({"dim": 60}, False),
        ({"offset": 1}, False),
        ({"major": 8}, False),
        ({"major": 10}, False),
        ({"major": 12}, False),
    ],
)
def test_which_products_the_hopper_kernels_serve(change, served, monkeypatch):
    """cuBLAS serves the others; other GPUs may lack the shared memory."""
    from trapline.gold import device as gold_device
    from trapline.gold.tree_decoding.hopper import linear_many_rows

    given = {"lines": 64, "kind": torch.bfloat16, "dim": 64, "offset": 0, "major": 9, **change}
    dim, offset = given["dim"], given["offset"]
    shapes = {"qkv": (96, dim), "out": (dim, 64), "up": (256, dim), "down": (dim, 128)}
    layer = SimpleNamespace(
        **{
            name: torch.zeros(height * width + offset, dtype=given["kind"])[offset:].view(-1, width)
            for name, (height, width) in shapes.items()
        }
    )
    monkeypatch.setattr(linear_many_rows, "LARGE", 1)
    monkeypatch.setattr(
        linear_many_rows, "is_hopper", lambda _: gold_device.is_hopper(torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (given["major"], 0))
    assert linear_many_rows.supports(layer, given["lines"]) == served


@pytest.mark.parametrize("temperature", gpu((0.0,), (1.0,)))
def test_bulk_answers_equal_plain_decoding(temperature):
    target, _ = models(torch.float32, layers=2)
    prompts = [[3, 4, 5 + number] for number in range(6)]
    texts = regenerate_in_bulk(
        target, prompts, max_new_tokens=9, temperatures=(temperature,), batch=4
    )
    assert [text.tokens[:3] for text in texts] == prompts[:4]
    assert all(len(text.tokens) == 12 for text in texts)
    if temperature == 0.0:
        wanted = plain(target, prompts[:4], max_new_tokens=9, batch=4)
        assert [text.tokens[3:] for text in texts] == wanted
