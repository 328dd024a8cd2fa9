"""Compact rounds: kernels in the interpreter, compiled for Hopper, and whole answers on a GPU."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import DecoderConfig, RopeConfig
from trapline.gold.decoder.generate import generate as plain
from trapline.gold.errors import RangeError, UnsupportedError
from trapline.gold.tree_decoding.drafter import drafter_config
from trapline.gold.tree_decoding.drafter_static import StaticDFlash, StaticLookup
from trapline.gold.tree_decoding.generate_graphs import StaticGenerator
from trapline.gold.tree_decoding.generate_static import StaticConfig
from trapline.gold.tree_decoding.training import fresh, regenerate_in_bulk

pytest.importorskip("triton")
HERE = Path(__file__).parent
FULL = pytest.mark.full
on_a_gpu = [
    pytest.mark.needs_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpu(*cases):
    return [pytest.param(*case, marks=on_a_gpu) for case in cases]


def test_the_interpreted_kernels_do_what_torch_does(tmp_path, run_script):
    run_script(HERE / "interpret_rounds.py", tmp_path, TRITON_INTERPRET="1")
    found = json.loads((tmp_path / "rounds.json").read_text())
    assert all(found["verdict"])
    assert len(found["verdict"]) == 24
    assert found["prepare"]
    assert found["nothing"]
    assert found["move"]
    assert found["draw"]
    assert found["lookup"]
    assert max(found["attend"]) < 2e-6
    assert found["begin"] < 2e-5
    assert found["large"] < 2e-4


@pytest.mark.parametrize(("which", "count"), [("few", 3), pytest.param("all", 32, marks=FULL)])
def test_the_kernels_compile_for_hopper(tmp_path, run_script, which, count):
    run_script(HERE / "compile_rounds.py", tmp_path, TRITON_INTERPRET="0", KERNELS=which)
    compiled = json.loads((tmp_path / "compiled.json").read_text())
    assert len(compiled) == count
    assert all(entry["shared"] <= 232448 for entry in compiled)


def test_weights_are_joined_once():
    from trapline.gold.tree_decoding.tree_pass import joined

    parts = [torch.nn.Linear(4, size, bias=False) for size in (3, 2, 5)]
    wanted = torch.cat([part.weight.detach() for part in parts])
    first, second = joined(*parts), joined(*parts)
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted)
    assert first.data_ptr() == second.data_ptr() == parts[0].weight.data_ptr()
    other = joined(parts[0], parts[2])
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


def compact(kind, target, model, rows, budget, room=256, temperature=0.0):
    from trapline.gold.tree_decoding.fast_drafters import FusedDFlash, FusedLookup
    from trapline.gold.tree_decoding.fast_generate import FastGenerator

    drafter = None
    if kind == "lookup":
        drafter = FusedLookup(block=budget)
    elif kind is not None:
        drafter = FusedDFlash(model, target, rows, room, budget=budget, chain=kind == "chain")
    return FastGenerator(target, drafter, StaticConfig(rows, room, temperature, seed=3))


def static(kind, target, model, rows, budget, room=256):
    drafter = None
    if kind == "lookup":
        drafter = StaticLookup(rows, room, block=budget, device="cuda")
    elif kind is not None:
        drafter = StaticDFlash(model, target, rows, room, budget=budget, chain=kind == "chain")
    return StaticGenerator(target, drafter, StaticConfig(rows, room))


@pytest.mark.parametrize(
    ("kind", "rows", "budget"),
    gpu(
        (None, 1, 0),
        (None, 5, 0),
        ("lookup", 3, 7),
        ("chain", 1, 7),
        ("chain", 4, 7),
        ("tree", 1, 5),
        ("tree", 3, 16),
        ("tree", 2, 40),
        ("tree", 2, 100),
    ),
)
def test_answers_in_float32_are_plain_decoding_s(kind, rows, budget):
    """Twice, the second time over used caches; drafted as the static rounds draft."""
    target, model = models(torch.float32)
    prompts = prompts_for(rows)
    wanted = plain(target, prompts, max_new_tokens=40, stop_ids=[11], batch=rows)
    rounds = compact(kind, target, model, rows, budget, room=384)
    for _ in range(2):
        done = rounds.generate(prompts, max_new_tokens=40, stop_ids=[11])
        assert done.tokens == wanted
    other = static(kind, target, model, rows, budget, room=384)
    again = other.generate(prompts, max_new_tokens=40, stop_ids=[11])
    assert done.statistics.passes == again.statistics.passes


@pytest.mark.parametrize(("kind", "budget"), gpu((None, 0), ("chain", 7), ("tree", 15)))
def test_prompts_that_find_no_free_row_wait(kind, budget):
    """Answers do not depend on the row, nor on who was there before; sampled ones neither."""
    target, model = models(torch.float32)
    prompts = prompts_for(7)
    wanted = plain(target, prompts, max_new_tokens=20, stop_ids=[11], batch=7)
    rounds = compact(kind, target, model, 2, budget)
    assert rounds.generate(prompts, max_new_tokens=20, stop_ids=[11]).tokens == wanted
    all_at_once = compact(None, target, model, 7, 0, temperature=1.0)
    two_at_a_time = compact(kind, target, model, 2, budget, temperature=1.0)
    drawn = all_at_once.generate(prompts, max_new_tokens=20).tokens
    assert two_at_a_time.generate(prompts, max_new_tokens=20).tokens == drawn


@pytest.mark.parametrize(("kind", "budget"), gpu(("chain", 7), ("tree", 24)))
def test_sampled_texts_are_the_same_with_and_without_a_drafter(kind, budget):
    target, model = models(torch.float32)
    prompts = prompts_for(2)
    alone = compact(None, target, model, 2, 0, temperature=1.0)
    rounds = compact(kind, target, model, 2, budget, temperature=1.0)
    wanted = alone.generate(prompts, max_new_tokens=48).tokens
    assert rounds.generate(prompts, max_new_tokens=48).tokens == wanted


@pytest.mark.parametrize("kind", gpu(("chain",), ("tree",)))
def test_large_products_give_the_same_answers(kind, monkeypatch):
    """The path of large models, in float32 on a small one."""
    from trapline.gold.tree_decoding import generate_large

    target, model = models(torch.float32)
    prompts = prompts_for(3)
    wanted = plain(target, prompts, max_new_tokens=30, batch=3)
    monkeypatch.setattr(generate_large, "LARGE", 1)
    rounds = compact(kind, target, model, 3, 7 if kind == "chain" else 12)
    assert rounds.rounds.verifier.wide
    assert rounds.generate(prompts, max_new_tokens=30).tokens == wanted


@pytest.mark.parametrize("kind", gpu((None,), ("chain",), ("tree",)))
def test_answers_in_bfloat16_begin_as_plain_decoding_s(kind):
    """Two nearly equal logits may swap; most tokens come before the first such place."""
    target, model = models(torch.bfloat16, layers=2)
    prompts = prompts_for(8)
    wanted = plain(target, prompts, max_new_tokens=24, batch=8)
    done = compact(kind, target, model, 8, 7 if kind == "chain" else 16)
    found = done.generate(prompts, max_new_tokens=24).tokens
    same = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), 24)
        for a, b in zip(found, wanted, strict=True)
    ]
    assert sum(same) >= 0.5 * 24 * 8


@pytest.mark.parametrize(
    ("kind", "budget", "rows"), gpu(("chain", 7, 3), ("chain", 7, 8), ("tree", 14, 8))
)
def test_large_products_of_some_dozens_of_lines(kind, budget, rows, monkeypatch):
    """The same logits, features and drafts as by the other kernels; 24, 64 and 120 lines."""
    from trapline.gold.tree_decoding import generate_large
    from trapline.gold.tree_decoding.tree_pass import Trees

    target, model = models(torch.bfloat16, layers=2, hidden=2048 + 32)
    found = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(generate_large, "LARGE", least)
        rounds = compact(kind, target, model, rows, budget).rounds
        assert (rounds.verifier._large is not None) == (least == 1)
        rounds.open(prompts_for(rows), 0)
        rounds.drafter.propose(rounds.state, rounds.proposal)
        drafted = rounds.drafter._pass.lines.clone()
        rounds.proposal.ids.copy_(torch.arange(len(rounds.proposal.ids)) * 7)
        made, lengths = rounds.proposal, rounds.state.lengths
        tiles = rounds.verifier.run(made.ids, Trees(lengths, made.depths * 0, made.seen * 0 + 1))
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


def test_trees_by_the_decoder_are_plain_decoding_of_every_branch():
    """What a GPU is compared with below."""
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

    Of bfloat16 these are two tiles of 128 and three of 64. Rounding alone is 0.010; one key that is
    not seen would be 0.12, and one sibling that is 0.026.
    """
    from trapline.gold.tree_decoding import generate_large
    from trapline.gold.tree_decoding.tree_pass import Trees

    shape = {"dim": 1024, "heads": 32, "kv_heads": 8, "head_dim": 128, "hidden": 2048 + 32}
    target, model = models(dtype, layers=2, **shape)
    prompts = prompts_for(8, 131)
    monkeypatch.setattr(generate_large, "LARGE", 1)
    rounds = compact(kind, target, model, 8, budget).rounds
    assert (rounds.verifier._large is not None) == (dtype == torch.bfloat16)
    rounds.open(prompts, 0)
    rounds.drafter.propose(rounds.state, rounds.proposal)
    made, lengths = rounds.proposal, rounds.state.lengths
    rounds.choose(rounds.verifier.run(made.ids, Trees(lengths, made.depths, made.seen)))
    ours = rounds.verifier.lines, rounds.verifier.features
    assert torch.equal(rounds.choices, ours[0].argmax(dim=-1))
    wanted = passed(target, prompts, made, rounds.target_layers)
    for mine, other in zip(ours, wanted, strict=True):
        assert (mine.cpu() - other).norm() < most * other.norm()


@pytest.mark.parametrize(("lines", "boxed"), [(64, False), (65, True), (128, True)])
def test_q_k_v_of_many_lines_come_by_the_copy_engine(lines, boxed):
    from trapline.gold.decoder.tile_config import uses_tma
    from trapline.gold.tree_decoding.generate_large import large_cut

    weights = torch.empty((6144, 4096), dtype=torch.bfloat16, device="meta")
    assert uses_tma("normed_linear", large_cut("normed_linear", lines, 6144), weights) == boxed


@pytest.mark.parametrize("part", ["attention_bias", "mlp_bias"])
def test_targets_with_biases_are_refused(part):
    """The kernels of a pass have none: logits would be others without a word."""
    from trapline.gold.tree_decoding.fast_rounds import FusedRounds

    config = DecoderConfig(
        family="llama", vocab=64, dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, hidden=64,
        context=64, norm_eps=1e-6, tied=True, rope=RopeConfig(), **{part: True},
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="biases"):
        FusedRounds(Decoder(config), None, StaticConfig(1, 64))


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
def test_which_products_are_large_ones(change, served, monkeypatch):
    """Others are cuBLAS's, on other GPUs too: as many stages need not fit their shared memory."""
    from trapline.gold import device as gold_device
    from trapline.gold.tree_decoding import generate_large

    given = {"lines": 64, "kind": torch.bfloat16, "dim": 64, "offset": 0, "major": 9, **change}
    dim, offset = given["dim"], given["offset"]
    shapes = {"qkv": (96, dim), "out": (dim, 64), "up": (256, dim), "down": (dim, 128)}
    layer = SimpleNamespace(
        **{
            name: torch.zeros(height * width + offset, dtype=given["kind"])[offset:].view(-1, width)
            for name, (height, width) in shapes.items()
        }
    )
    monkeypatch.setattr(generate_large, "LARGE", 1)
    monkeypatch.setattr(
        generate_large, "is_hopper", lambda _: gold_device.is_hopper(torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (given["major"], 0))
    assert generate_large.serves(layer, given["lines"]) == served


@pytest.mark.parametrize("temperature", gpu((0.0,), (1.0,)))
def test_texts_to_learn_from_are_the_target_s(temperature):
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


@pytest.mark.parametrize("kind", gpu(("tree",)))
def test_bad_input_is_refused_by_name_on_a_gpu(kind):
    target, model = models(torch.float32, layers=2)
    with pytest.raises(RangeError, match="budget"):
        compact(kind, target, model, 1, 0)
    rounds = compact(kind, target, model, 1, 8, room=64)
    with pytest.raises(RangeError, match="mask id"):
        rounds.generate([[2047]], max_new_tokens=2)
    with pytest.raises(RangeError, match="room for"):
        rounds.generate([[1]], max_new_tokens=60)
    with pytest.raises(RangeError, match="empty"):
        rounds.generate([[]], max_new_tokens=2)
