"""The DFlash drafter: training equals inference, nothing leaks, and it learns its target."""

import json

import pytest
import torch
from torch.nn import functional

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.config import DecoderConfig
from trapline.gold.decoder.generate import generate as plain
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.tree_decoding import checkpoint, train
from trapline.gold.tree_decoding.bulk_answers import EqualRows
from trapline.gold.tree_decoding.decoder_target import DecoderTarget
from trapline.gold.tree_decoding.drafter import (
    DFlash,
    DFlashDrafter,
    attend_blocks,
    drafter_config,
    spread_layers,
)
from trapline.gold.tree_decoding.generate import Row, generate
from trapline.gold.tree_decoding.prompt_lookup import PromptLookup
from trapline.gold.tree_decoding.training import (
    Lesson,
    Text,
    TrainingConfig,
    before_loops,
    block_loss,
    fresh,
    regenerate,
    regenerate_in_bulk,
    schedule,
)
from trapline.gold.tree_decoding.training import train as train_drafter

VOCAB, MASK = 24, 23


def random_target(layers=3, dim=32, vocab=VOCAB, seed=0, window=None):
    config = DecoderConfig(
        family="llama",
        vocab=vocab,
        dim=dim,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        hidden=48,
        context=96,
        norm_eps=1e-6,
        tied=True,
        rope=RopeConfig(),
        window=window,
    )
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config).eval().requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return decoder


def random_prompts(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, MASK, (count, 5), generator=generator).tolist()


@pytest.fixture(scope="module")
def pair():
    """A random target and a drafter trained on its answers, in seconds."""
    target = random_target()
    model = fresh(drafter_config(target.config, layers=2, block=6, mask_id=MASK), 0)
    texts = regenerate(target, random_prompts(48, 1), max_new_tokens=32)
    how = TrainingConfig(steps=90, batch=6, anchors=12, learning_rate=2e-3)
    losses = train_drafter(model, target, texts, how)
    return target, model, losses


@torch.no_grad()
@pytest.mark.parametrize("anchor", [0, 1, 5])
def test_training_sees_a_block_as_inference_does(anchor):
    target = random_target()
    model = fresh(drafter_config(target.config, layers=2, block=4, mask_id=MASK), 1)
    features = torch.randn(1, 9, 2 * 32, generator=torch.Generator().manual_seed(0))
    blocks = torch.randn(1, 2, 4, 32, generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([[anchor, 7]])
    trained = model.train_hidden(features, blocks, anchors)[0, 0]
    cache = model.new_cache()
    if anchor:
        # In two pieces: the cache grows as tokens are committed.
        for piece in features[0, :anchor].split(3):
            model.remember([piece], [cache])
    for _ in range(2):  # a block leaves nothing behind
        used = model.hidden(blocks[:, 0], [cache])[0]
        torch.testing.assert_close(used, trained, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_block_sees_nothing_at_or_behind_its_anchor():
    target = random_target()
    model = fresh(drafter_config(target.config, layers=2, block=4, mask_id=MASK), 1)
    features = torch.randn(1, 9, 2 * 32)
    blocks, anchors = torch.randn(1, 1, 4, 32), torch.tensor([[5]])
    before = model.train_hidden(features, blocks, anchors)
    features[:, 5:] = 100.0
    assert torch.equal(model.train_hidden(features, blocks, anchors), before)
    features[:, 4] = 100.0
    assert not torch.allclose(model.train_hidden(features, blocks, anchors), before)


@torch.no_grad()
def test_slot_of_the_anchor_predicts_nothing():
    """Row k of a draft is slot k + 1 of the block: what training judges by token k + 1."""
    target = random_target()
    model = fresh(drafter_config(target.config, layers=2, block=4, mask_id=MASK), 1)
    text = [3, 1, 4, 1, 5]
    run = target.run([text[:-1]], [target.new_cache()], features=model.config.target_layers)
    features = torch.cat(run.features, dim=-1)
    row = Row(0, text, len(text), fresh=[features])
    (draft,) = DFlashDrafter(model, target).draft([row])
    blocks = target.embedding(torch.tensor([[[5, MASK, MASK, MASK]]]))
    hidden = model.train_hidden(features[None], blocks, torch.tensor([[4]]))[0, 0]
    want = torch.log_softmax(target.logits(hidden[1:]), dim=-1)
    torch.testing.assert_close(draft, want, atol=1e-4, rtol=1e-4)


def test_positions_keep_their_precision_in_sixteen_bits():
    model = fresh(drafter_config(random_target().config, block=4, mask_id=MASK), 1)
    exact = model.angles(torch.tensor([3001]))[0]
    rough = model.to(torch.bfloat16).angles(torch.tensor([3001]))[0]
    torch.testing.assert_close(rough.float(), exact, atol=5e-3, rtol=0)


@torch.no_grad()
def test_block_attention_equals_masked_softmax():
    """Anchors 1 and 3 of four context rows, blocks of two: the mask written out by hand."""
    luck = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 2, 4, 8, generator=luck)
    old = tuple(torch.randn(1, 4, 2, 8, generator=luck) for _ in range(2))
    own = tuple(torch.randn(1, 2, 2, 2, 8, generator=luck) for _ in range(2))
    early = torch.arange(4) < torch.tensor([[1, 3]])[:, :, None]
    found = attend_blocks(q, old, own, early)
    seen = torch.tensor(
        [
            [1, 0, 0, 0, 1, 1, 0, 0],
            [1, 0, 0, 0, 1, 1, 0, 0],
            [1, 1, 1, 0, 0, 0, 1, 1],
            [1, 1, 1, 0, 0, 0, 1, 1],
        ]
    ).bool()
    k, v = (torch.cat((a, b.flatten(1, 2)), dim=1) for a, b in zip(old, own, strict=True))
    sides = (side.transpose(1, 2) for side in (q.flatten(1, 2), k, v))
    want = functional.scaled_dot_product_attention(*sides, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(found.flatten(1, 2), want.transpose(1, 2))


def test_anchors_are_followed_by_target_tokens():
    texts = [Text([1, 2, 3, 4, 5], 2), Text([6, 7, 8], 1)]
    lesson = Lesson(texts, random_target(), (0,))
    luck = torch.rand((2, 201), generator=torch.Generator().manual_seed(0))
    luck[:, 0] = torch.tensor([0.2, 0.7])  # the first text, the second
    batch = lesson.draw(luck, 4)
    assert set(batch.anchors[0].tolist()) == {1, 2, 3}
    assert set(batch.anchors[1].tolist()) == {0, 1}
    at_three = batch.anchors[0].tolist().index(3)
    assert batch.labels[0, at_three, :2].tolist() == [4, 5]
    assert batch.judged[0, at_three].tolist() == [False, True, False, False]


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
def test_lesson_holds_features_and_logits_of_the_target(window):
    target, texts = random_target(window=window), [Text([1, 2, 3, 4, 5], 2), Text([6, 7, 8], 1)]
    lesson = Lesson(texts, target, (0, 2))
    for number, text in enumerate(texts):
        run = target.run([text.tokens], [target.new_cache()], features=(0, 2))
        count = len(text.tokens)
        torch.testing.assert_close(lesson.features[number, :count], torch.cat(run.features, -1))
        torch.testing.assert_close(lesson.last[number, :count], run.last)
    luck = torch.tensor([[0.0, 0.0, 0.5]])  # the first text, anchors at 1 and 2
    batch = lesson.draw(luck, 3)
    said = target.logits(batch.before)[0]
    want = target(lesson.ids[:1])[0]
    torch.testing.assert_close(said[0], want[1:3])
    torch.testing.assert_close(said[1], want[2:4])


def test_bulk_answers_equal_those_of_the_target():
    target, prompts = random_target(), random_prompts(6, 5)
    options = {"max_new_tokens": 12, "batch": 3}
    texts = regenerate_in_bulk(target, prompts, temperatures=(0.0,), **options)
    assert texts == regenerate(target, prompts, temperatures=(0.0,), **options)
    again = regenerate_in_bulk(target, prompts[:5], temperatures=(1.0, 0.0), **options)
    assert len(again) == 3  # two of five fill no batch
    assert again[1] == texts[1]
    with pytest.raises(RangeError, match="expected 3 prompts"):
        EqualRows(target, 3, 20).answer(torch.tensor(prompts[:2]), 4, (0.0,))


@torch.no_grad()
def test_sampled_bulk_answers_follow_the_target_distribution():
    target = random_target()
    rows = 4000
    said = EqualRows(target, rows, 5, seed=3).answer(torch.tensor([[3, 1, 4]] * rows), 1, (0.7,))
    found = torch.bincount(said[:, 3], minlength=VOCAB) / rows
    law = torch.softmax(target(torch.tensor([[3, 1, 4]]))[0, -1] / 0.7, dim=-1)
    # Five standard deviations of a share; the luck is fixed.
    assert bool(((found - law).abs() <= 5 * (law * (1 - law) / rows).sqrt() + 1e-3).all())


def test_soft_labels_use_the_target_distribution():
    """With labels that are the law's own surest tokens, soft and hard losses differ by the rest."""
    target = random_target()
    model = fresh(drafter_config(target.config, layers=1, block=4, mask_id=MASK), 1)
    lesson = Lesson([Text([1, 2, 3, 4, 5, 6], 1)], target, model.config.target_layers)
    batch = lesson.draw(torch.tensor([[0.0, 0.3, 0.6]]), 4)
    hard, half, soft = (
        float(block_loss(model, target, batch, TrainingConfig(soft=share)).detach())
        for share in (0.0, 0.5, 1.0)
    )
    assert half == pytest.approx((hard + soft) / 2, rel=1e-5)
    assert hard != pytest.approx(soft, rel=1e-3)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_both_optimisers_learn(optimiser):
    target = random_target()
    model = fresh(drafter_config(target.config, layers=1, block=4, mask_id=MASK), 1)
    texts = regenerate_in_bulk(target, random_prompts(16, 5), max_new_tokens=16)
    rate = 2e-3 if optimiser == "adamw" else 0.1
    how = TrainingConfig(
        steps=30, batch=8, anchors=8, learning_rate=rate, optimiser=optimiser, look=29
    )
    first, last = train_drafter(model, target, texts, how)
    assert last < 0.95 * first


def test_text_before_a_loop_is_kept():
    loop = Text([1, 2, *range(3, 20), *range(3, 20)], 2)
    assert before_loops(loop) == Text([1, 2, *range(3, 20), *range(3, 10)], 2)
    straight = Text([1, 1, 1, *range(30)], 1)
    assert before_loops(straight) == straight
    assert before_loops(Text([5] * 40, 3)) == Text([5] * 11, 3)


def test_the_learning_rate_warms_up_and_falls_to_zero():
    config = TrainingConfig(steps=100, warm_up=0.1)
    rates = [schedule(step / 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1, abs=0.01)
    assert max(rates) == 1.0
    assert rates[-1] < 0.001


def test_layers_are_spread_over_the_target():
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(3, 2) == (1, 2)
    assert spread_layers(1, 4) == (0,)
    assert spread_layers(4, 1) == (3,)


def test_trained_drafter_keeps_the_answers_of_the_target(pair):
    target, model, losses = pair
    assert losses[-1] < 0.7 * losses[0]
    prompts = random_prompts(12, 2)
    want = plain(target, prompts, max_new_tokens=24)
    drafter = DFlashDrafter(model, target)
    tau = {}
    for mode in ("chain", "tree"):
        done = generate(
            DecoderTarget(target, drafter.target_layers),
            drafter,
            prompts,
            max_new_tokens=24,
            mode=mode,
            budget=20,
            batch=5,
        )
        assert done.tokens == want
        tau[mode] = done.statistics.tau
    assert tau["chain"] > 1.2
    assert tau["tree"] > tau["chain"]


@pytest.mark.needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_on_a_gpu_learns_as_one_on_a_cpu(compiled):
    """In 16 bits, from the same luck: the same losses up to rounding, all the way down."""
    how = {"steps": 60, "batch": 8, "anchors": 8, "learning_rate": 0.1, "optimiser": "muon"}
    losses = {}
    for device in ("cpu", "cuda"):
        target = random_target().to(device)
        model = fresh(drafter_config(target.config, layers=2, block=4, mask_id=MASK), 1).to(device)
        texts = regenerate_in_bulk(target, random_prompts(32, 5), max_new_tokens=16)
        config = TrainingConfig(**how, soft=0.2, look=59, compile=compiled and device == "cuda")
        losses[device] = train_drafter(model, target, texts, config)
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.1)
    assert losses["cuda"][1] < 0.8 * losses["cuda"][0]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_500_prompts_of_the_trained_pair_have_the_ids_of_plain_decoding(pair, mode):
    target, model, _ = pair
    prompts = random_prompts(500, 3)
    drafter = DFlashDrafter(model, target)
    speculative = DecoderTarget(target, drafter.target_layers)
    options = {"max_new_tokens": 24, "batch": 50}
    done = generate(speculative, drafter, prompts, mode=mode, budget=20, **options)
    assert done.tokens == plain(target, prompts, **options)


@torch.no_grad()
def test_rejected_tokens_do_not_affect_the_next_draft(pair):
    """The draft after some rounds equals the draft of a drafter that starts with that text."""
    target, model, _ = pair
    drafter = DFlashDrafter(model, target)
    asked = []

    class Watched(DFlashDrafter):
        def draft(self, rows):
            drafts = super().draft(rows)
            asked.append((list(rows[0].tokens), drafts[0]))
            return drafts

    speculative = DecoderTarget(target, drafter.target_layers)
    (prompt,) = random_prompts(1, 4)
    generate(speculative, Watched(model, target), [prompt], max_new_tokens=20, budget=12)
    text, late = asked[-1]
    assert len(asked) > 3
    asked.clear()
    generate(speculative, Watched(model, target), [text], max_new_tokens=2, budget=1)
    torch.testing.assert_close(asked[0][1], late, atol=1e-4, rtol=1e-4)


def test_checkpoints_round_trip_and_name_what_is_wrong(pair, tmp_path):
    _, model, _ = pair
    checkpoint.save(model, tmp_path)
    again = checkpoint.load(tmp_path)
    assert again.config.target_layers == model.config.target_layers
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    written = json.loads((tmp_path / "drafter.json").read_text())
    (tmp_path / "drafter.json").write_text(json.dumps({**written, "hidden": 50}))
    with pytest.raises(ShapeError, match="has shape"):
        checkpoint.load(tmp_path)
    for name, value in {
        "dim": 8.7,
        "target_layers": ["a"],
        "norm_eps": "x",
        "mask_id": 1.5,
    }.items():
        (tmp_path / "drafter.json").write_text(json.dumps({**written, name: value}))
        with pytest.raises(RangeError, match=name):
            checkpoint.load(tmp_path)
    (tmp_path / "drafter.json").write_text("[]")
    with pytest.raises(RangeError, match="must hold a JSON object"):
        checkpoint.load(tmp_path)
    (tmp_path / "drafter.json").write_text(json.dumps(written))
    (tmp_path / "drafter.safetensors").write_text("junk")
    with pytest.raises(RangeError, match="is not a safetensors file"):
        checkpoint.load(tmp_path)
    del written["block"]
    (tmp_path / "drafter.json").write_text(json.dumps(written))
    with pytest.raises(RangeError, match="block"):
        checkpoint.load(tmp_path)
    (tmp_path / "drafter.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"drafter\.safetensors"):
        checkpoint.load(tmp_path)


def test_mismatched_models_are_rejected():
    target = random_target()
    other = drafter_config(random_target(vocab=30).config, mask_id=29)
    with pytest.raises(ShapeError, match="vocabulary of 30 is not the target's 24"):
        DFlashDrafter(DFlash(other), target)
    wide = drafter_config(random_target(dim=48).config, mask_id=MASK)
    with pytest.raises(ShapeError, match="width of 48 is not the target's 32"):
        DFlashDrafter(DFlash(wide), target)
    deep = drafter_config(random_target(layers=12).config, mask_id=MASK)
    with pytest.raises(RangeError, match="layer 9"):
        DFlashDrafter(DFlash(deep), target)
    drafter = DFlashDrafter(DFlash(drafter_config(target.config, mask_id=MASK)), target)
    with pytest.raises(RangeError, match="mask id 23"):
        generate(DecoderTarget(target), drafter, [[1, MASK, 2]], max_new_tokens=3)
    with pytest.raises(RangeError, match="mask_id"):
        drafter_config(target.config, mask_id=VOCAB)
    with pytest.raises(RangeError, match="block"):
        drafter_config(target.config, mask_id=MASK, block=1)
    with pytest.raises(RangeError, match="two tokens"):
        train_drafter(drafter.model, target, [Text([1, 2], 1)], TrainingConfig(steps=1))
    with pytest.raises(RangeError, match="steps"):
        TrainingConfig(steps=0)
    with pytest.raises(RangeError, match="longest"):
        PromptLookup(VOCAB, longest=0)


def test_the_command_trains_a_drafter_from_a_checkpoint_and_text(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    target = random_target()
    target.save_pretrained(tmp_path / "model")
    words = {word: number for number, word in enumerate("abcdefghijklmnopqrstuvw")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b c d\n\ne f g h i\n\nk l m")
    sizes = ["--steps", "3", "--answer", "8", "--prompt", "4", "--block", "4", "--layers", "1"]
    places = ["--target", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]
    assert train.main([*places, "--out", str(tmp_path / "drafter"), *sizes]) == 0
    assert "saved in" in capsys.readouterr().out
    checkpoint.load(tmp_path / "drafter").check_fits(target)
    missing = ["--target", str(tmp_path / "none"), "--text", str(tmp_path / "text.txt")]
    assert train.main([*missing, "--out", str(tmp_path / "drafter")]) == 2
    assert "config.json" in capsys.readouterr().err
