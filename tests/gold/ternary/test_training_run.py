"""From text to a checkpoint: a tiny decoder is trained, stopped, resumed, packed, judged."""

import csv
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from trapline.gold.atomic_write import write_folder
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.generate import generate
from trapline.gold.errors import RangeError, ShapeError
from trapline.gold.ternary.layers import assert_all_ternary, convert, dequantized, latents
from trapline.gold.ternary.training import data
from trapline.gold.ternary.training import run as train_run
from trapline.gold.ternary.training.model import DecoderLM, Shape, decoder_config, initialise
from trapline.gold.ternary.training.optimizers import make_optimisers
from trapline.gold.ternary.training.tokenizer import encode, train_tokenizer
from trapline.gold.ternary.training.trainer import Recipe, Trainer

SHAPE = Shape(vocab=280, dim=16, layers=1, heads=2, context=12)
RECIPE = Recipe(steps=24, batch=4, evaluate_every=8, warm_up=4, peak_rate=0.1)
INF, NAN = float("inf"), float("nan")
WORDS = ("river", "stone", "light", "market", "window", "garden", "winter", "letter")


def sentence(number):
    """Follows a rule, so that there is something to learn; no two are alike."""
    first, second = WORDS[number % 8], WORDS[(number + 3) % 8]
    return f"the {first} saw the {second} and counted to {number}."


@pytest.fixture
def job(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(sentence(number) for number in range(80)))
    return train_run.Job((text,), tmp_path / "run", SHAPE, RECIPE, held_out=0.2)


def test_run_writes_models_that_generate(job):
    rows = []
    result = train_run.run(job, on_row=rows.append)
    assert rows[-1].valid_loss < rows[0].valid_loss
    assert result.packed_bytes < result.parameters
    assert {share.name for share in result.coverage if len(share.shape) > 1} == {
        share.name for share in result.coverage if share.ternary
    }
    dense = Decoder.from_pretrained(job.out / "model")
    small = Decoder.from_pretrained(job.out / "packed")
    for decoder in (dense, small):
        assert len(generate(decoder, [[5, 6]], max_new_tokens=6)[0]) == 6
    with torch.no_grad():
        ids = torch.arange(12)[None]
        assert torch.allclose(dense(ids), small(ids), atol=1e-4)
    with (job.out / "curves.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(line["step"]) for line in table] == [8, 16, 24]
    assert float(table[-1]["valid_loss"]) == rows[-1].valid_loss
    assert json.loads((job.out / "run.json").read_text())["steps"] == 24
    assert (job.out / "curves.png").stat().st_size > 1000


def test_written_models_have_the_best_loss(job):
    """The held-out loss of the files is that of the best step: nothing is lost on the way out."""
    result = train_run.run(job)
    text = train_run.prepare(job)
    for name in ("model", "packed"):
        decoder = Decoder.from_pretrained(job.out / name)
        with torch.no_grad():
            windows = torch.from_numpy(text.valid).long()
            logits = decoder(windows[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten())
        assert float(loss) == pytest.approx(result.best_loss, abs=2e-5), name


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_resumed_run_is_exact(job, tmp_path, optimiser):
    job = replace(job, recipe=replace(RECIPE, optimiser=optimiser, accumulate=2, batch=2))
    whole = train_run.make_trainer(job, train_run.prepare(job))
    expected = whole.run().state_dict()
    first = train_run.make_trainer(job, train_run.prepare(job))
    first.run(stop_at=11)
    job.out.mkdir()
    first.save(job.out / train_run.CHECKPOINT)
    second = train_run.make_trainer(replace(job, resume=True), train_run.prepare(job))
    got = second.run().state_dict()
    assert second.progress == whole.progress
    for name, value in expected.items():
        assert torch.equal(value, got[name]), name


def test_training_forward_matches_the_decoder():
    decoder = Decoder(decoder_config(SHAPE, kv_heads=1))
    initialise(decoder, 3)
    convert(decoder)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.allclose(DecoderLM(decoder)(ids), decoder(ids), atol=1e-4)


def test_latent_weights_do_not_decay():
    decoder = Decoder(decoder_config(SHAPE, tied=False))
    convert(decoder)
    model = DecoderLM(decoder)
    windows = np.zeros((2, 13), dtype=np.int64)
    trainer = Trainer(model, replace(RECIPE, weight_decay=0.1), windows, windows)
    hidden = {id(module.weight) for module in latents(model)}
    for group in trainer.optimisers[0].param_groups:
        for parameter in group["params"]:
            assert id(parameter) in hidden or parameter.ndim < 2
            assert group["weight_decay"] == 0.0


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_decays_only_if_tied(tied):
    decoder = Decoder(decoder_config(SHAPE, tied=tied))
    recipe = replace(RECIPE, weight_decay=0.1)
    decays = {
        id(parameter): group["weight_decay"]
        for optimiser in make_optimisers(DecoderLM(decoder), recipe)
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    assert decays[id(decoder.embedding.weight)] == (0.1 if tied else 0.0)
    assert decays[id(decoder.head.weight)] == 0.1
    assert decays[id(decoder.norm.weight)] == 0.0


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_inner_matrices_have_their_own_rate(optimiser):
    decoder = Decoder(decoder_config(SHAPE, tied=False))

    def units(matrices):
        recipe = replace(RECIPE, optimiser=optimiser, matrices=matrices)
        made = make_optimisers(DecoderLM(decoder), recipe)
        groups = [group for one in made for group in one.param_groups]
        return {id(p): group["unit"] for group in groups for p in group["params"]}

    plain, faster = units(1.0), units(1.5)
    for name, parameter in decoder.named_parameters():
        inner = name.startswith("layers") and parameter.ndim == 2
        assert faster[id(parameter)] == plain[id(parameter)] * (1.5 if inner else 1.0), name
    with pytest.raises(RangeError, match="above 0"):
        replace(RECIPE, matrices=0.0)


def test_weights_harden_gradually_to_ternary(job):
    recipe = replace(RECIPE, soft=0.5)
    trainer = train_run.make_trainer(replace(job, recipe=recipe), train_run.prepare(job))
    tokens = trainer.train[:2, :-1].long()
    soft, hard = [], []

    def looked_at(step, loss):
        with torch.no_grad():
            soft.append(trainer.model(tokens))
            hard.append(DecoderLM(dequantized(trainer.model.decoder))(tokens))

    best = trainer.run(on_step=looked_at)
    # Steps 1 to 12 of 24 are soft; what is judged and returned is ternary throughout.
    same = [torch.equal(left, right) for left, right in zip(soft, hard, strict=True)]
    assert same == [False] * 12 + [True] * 12
    with torch.no_grad():
        assert torch.equal(best(tokens), DecoderLM(dequantized(best.decoder))(tokens))
    with pytest.raises(RangeError, match="ternary in the end"):
        Recipe(soft=1.0)


def test_a_captured_step_needs_a_gpu(job):
    captured = replace(job, recipe=replace(RECIPE, capture=True))
    with pytest.raises(RangeError, match="one GPU only"):
        train_run.make_trainer(captured, train_run.prepare(job))
    with pytest.raises(RangeError, match="one micro-batch"):
        Recipe(capture=True, accumulate=2)


def test_a_planted_leak_is_caught(job, tmp_path):
    clean = train_run.prepare(job)
    assert clean.leaks == 0
    documents = data.read_documents(job.texts)
    split = data.split_documents(documents, job.held_out)
    stolen = f"{split.valid[0]}\n{split.train[0]} and so on, at some length, to differ"
    job.texts[0].write_text("\n\n".join([*documents, stolen]))
    found = train_run.prepare(job)
    assert found.leaks > 0
    assert found.dropped > 0


def test_early_stopping_prevents_overfitting(job):
    """Noise has nothing to teach: what is learned from it is learned by heart."""
    rng = np.random.default_rng(0)
    train, valid = rng.integers(0, 12, (8, 13)), rng.integers(0, 12, (16, 13))
    shape = replace(SHAPE, vocab=12)

    def trained(patience):
        decoder = Decoder(decoder_config(shape))
        initialise(decoder, 0)
        convert(decoder)
        recipe = Recipe(steps=150, batch=8, evaluate_every=10, patience=patience, peak_rate=0.15)
        trainer = Trainer(DecoderLM(decoder), recipe, train, valid)
        trainer.run()
        return trainer.progress

    stopped, driven = trained(3), trained(None)
    assert stopped.step < driven.step == 150
    assert stopped.best_loss == driven.best_loss
    assert driven.rows[-1].train_loss < 1.2
    assert driven.rows[-1].perplexity > 2 * np.exp(stopped.best_loss)


def test_distillation_approaches_the_teacher(job, tmp_path):
    teacher_job = replace(
        job, out=tmp_path / "teacher", dense=True, recipe=replace(RECIPE, steps=16)
    )
    result = train_run.run(teacher_job)
    assert result.packed_bytes is None
    assert not (teacher_job.out / "packed").exists()
    taught = replace(
        job,
        teacher=teacher_job.out / "model",
        start=teacher_job.out / "model",
        recipe=replace(RECIPE, distill=1.0),
    )
    trainer = train_run.make_trainer(taught, train_run.prepare(taught))
    batch = trainer.train[:4]
    before = float(trainer.loss(batch).detach())
    trainer.run()
    assert float(trainer.loss(batch).detach()) < before
    assert_all_ternary(trainer.model)


def test_loss_spikes_are_skipped_reported_and_recovered_from():
    decoder = Decoder(decoder_config(SHAPE))
    windows = np.zeros((2, 13), dtype=np.int64)
    recipe = replace(RECIPE, steps=40, recovery=5, patience=None)
    trainer = Trainer(DecoderLM(decoder), recipe, windows, windows)
    plain, factor = trainer.loss, {}
    trainer.loss = lambda batch: (
        plain(batch) * factor.get(trainer.progress.step, 1.0)
        + (100.0 if trainer.progress.step == 12 else 0.0)
    )
    factor[20] = float("nan")
    trainer.run()
    assert trainer.progress.skipped == 2
    assert [event.split(":")[0] for event in trainer.progress.events] == ["step 13", "step 21"]
    assert trainer.progress.rate_factor == 1.0


def test_bf16_trains(job):
    recipe = replace(RECIPE, steps=2, evaluate_every=2, precision="bf16")
    result = train_run.run(replace(job, recipe=recipe))
    assert np.isfinite(result.best_loss)


def test_tokeniser_ends_documents_and_keeps_every_byte():
    tokenizer = train_tokenizer([sentence(number) for number in range(40)], 270)
    text = "a river — naïve\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    foreign = encode(tokenizer, ["one", "two"], [9, 7]).tolist()
    assert foreign.count(9) == 2
    assert foreign[-1] == 9
    assert 7 not in foreign
    stream = encode(tokenizer, ["one", "two"])
    assert list(stream).count(0) == 2
    assert stream[-1] == 0


def test_form_feeds_separate_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\nstill one\n\ftwo\n")
    (tmp_path / "b.txt").write_text("three\n\nfour")
    assert data.read_documents([tmp_path]) == ["one\n\nstill one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("change", "sentence_part"),
    [
        ({"shape": replace(SHAPE, vocab=9000)}, "supports a vocabulary of"),
        ({"shape": replace(SHAPE, vocab=100)}, "at least 257"),
        ({"shape": replace(SHAPE, context=100_000)}, "needs more"),
        ({"resume": True}, "to resume from"),
        ({"kv_heads": 3}, "evenly"),
        ({"held_out": 1.5}, "between 0 and 1"),
        ({"texts": ()}, "no text"),
    ],
)
def test_invalid_jobs_raise(job, change, sentence_part):
    with pytest.raises(RangeError, match=sentence_part):
        train_run.run(replace(job, **change))


def test_checkpoint_of_another_shape_raises(job):
    train_run.run(replace(job, recipe=replace(RECIPE, steps=2, evaluate_every=1)))
    with pytest.raises(RangeError, match="holds a run already"):
        train_run.run(job)
    with pytest.raises(ShapeError, match="other shapes"):
        train_run.run(replace(job, resume=True, shape=replace(SHAPE, dim=32)))
    with pytest.raises(ShapeError, match="other recipe: steps 2, here 24"):
        train_run.run(replace(job, resume=True))
    other = replace(SHAPE, vocab=300)
    taught = replace(job, out=job.out / "x", shape=other, teacher=job.out / "model")
    with pytest.raises(ShapeError, match="the teacher has 280 tokens"):
        train_run.run(taught)
    (job.out / train_run.CHECKPOINT).write_bytes(b"not a checkpoint")
    with pytest.raises(RangeError, match="is not the checkpoint"):
        train_run.run(replace(job, resume=True))


@pytest.mark.parametrize(
    ("change", "sentence_part"),
    [
        ({"dense": True}, "other inputs: quantiser"),
        ({"group_size": 8}, "other inputs: quantiser"),
        ({"method": "lstsq"}, "other inputs: quantiser"),
        ({"held_out": 0.4}, "other inputs: training text"),
        ({"shape": replace(SHAPE, context=8)}, "other inputs: training text"),
    ],
)
def test_resuming_with_other_inputs_raises(job, change, sentence_part):
    train_run.run(job)
    good = (job.out / "model" / "model.safetensors").read_bytes()
    with pytest.raises(ShapeError, match=sentence_part):
        train_run.run(replace(job, resume=True, **change))
    job.texts[0].write_text("\n\n".join(sentence(number) for number in range(90, 190)))
    with pytest.raises(ShapeError, match="other inputs"):
        train_run.run(replace(job, resume=True))
    assert (job.out / "model" / "model.safetensors").read_bytes() == good


def test_resuming_with_another_teacher_raises(job, tmp_path):
    short = replace(RECIPE, steps=2, evaluate_every=1)
    for seed in (0, 1):
        twin = replace(job, out=tmp_path / str(seed), dense=True, recipe=replace(short, seed=seed))
        train_run.run(twin)
    taught = replace(job, recipe=replace(short, distill=0.5), teacher=tmp_path / "0" / "model")
    train_run.run(taught)
    with pytest.raises(ShapeError, match="other inputs: teacher"):
        train_run.run(replace(taught, resume=True, teacher=tmp_path / "1" / "model"))


def test_teacher_with_another_tokeniser_raises(job, tmp_path):
    short = replace(job, dense=True, recipe=replace(RECIPE, steps=1, evaluate_every=1))
    train_run.run(short)
    other = tmp_path / "other.txt"
    other.write_text(
        "\n\n".join(f"{number} plus {number * 7} is no sentence" for number in range(80))
    )
    train_run.run(replace(short, out=tmp_path / "other", texts=(other,)))
    both = {"start": job.out / "model", "teacher": tmp_path / "other" / "model"}
    with pytest.raises(RangeError, match="different tokenisers"):
        train_run.run(replace(job, out=tmp_path / "x", **both))


@pytest.mark.parametrize(
    "left",
    [b"", b"hello", bytes(100), {"a": 1}, {"model": {}}, [1], torch.zeros(2)],
    ids=lambda left: type(left),
)
def test_invalid_checkpoint_raises(job, left):
    job.out.mkdir()
    path = job.out / train_run.CHECKPOINT
    if isinstance(left, bytes):
        path.write_bytes(left)
    else:
        torch.save(left, path)
    with pytest.raises(RangeError, match="is not the checkpoint of a run: it "):
        train_run.run(replace(job, resume=True))


def test_broken_tokeniser_raises(job):
    train_run.run(replace(job, recipe=replace(RECIPE, steps=1, evaluate_every=1)))
    (job.out / "model" / "tokenizer.json").write_text("[]")
    with pytest.raises(RangeError, match="is not a tokeniser"):
        train_run.run(replace(job, out=job.out / "x", start=job.out / "model"))


def test_diverged_run_writes_no_model(job):
    with pytest.raises(RangeError, match="nothing was learned"):
        train_run.run(replace(job, recipe=replace(RECIPE, peak_rate=1e30, final_rate=1e30)))
    assert not (job.out / "model").exists()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, (0, -1)) for name in ("steps", "batch", "accumulate", "evaluate_every")),
        *((name, (0, -1)) for name in ("patience", "average", "recovery")),
        *((name, (-1e-9, INF, NAN)) for name in ("peak_rate", "final_rate")),
        *((name, (-0.1, INF, NAN)) for name in ("weight_decay", "latent_decay", "spike")),
        *((name, (0.0, -1.0, INF, NAN)) for name in ("matrices", "temperature")),
        *((name, (-0.1, 1.1, INF, NAN)) for name in ("soft", "own_teacher", "distill")),
        ("distill_until", (0.0, -0.1, 1.1, INF, NAN)),
        ("clip", (0.0, -1.0, NAN)),
        ("warm_up", (-1,)),
        ("seed", (10**30,)),
    ],
)
def test_invalid_recipes_raise(name, values):
    for value in values:
        with pytest.raises(RangeError, match=rf"\b{name}\b|own teacher"):
            replace(RECIPE, **{name: value})


def test_infinite_clip_disables_clipping():
    assert replace(RECIPE, clip=INF).clip == INF


def test_starting_from_packed_weights_raises(job, tmp_path):
    train_run.run(replace(job, recipe=replace(RECIPE, steps=1, evaluate_every=1)))
    for dense in (False, True):
        again = replace(job, out=tmp_path / "again", start=job.out / "packed", dense=dense)
        with pytest.raises(RangeError, match="packed weights cannot be trained"):
            train_run.run(again)


def test_checkpoint_of_an_earlier_version_raises(job):
    train_run.run(replace(job, recipe=replace(RECIPE, steps=1, evaluate_every=1)))
    path = job.out / train_run.CHECKPOINT
    state = torch.load(path, weights_only=True)
    del state["inputs"]
    torch.save(state, path)
    with pytest.raises(RangeError, match=r"written by an earlier version: it has no inputs"):
        train_run.run(replace(job, resume=True))


@pytest.mark.parametrize("name", ["run.json", "curves.csv", "curves.png"])
def test_reports_are_written_atomically(job, name, monkeypatch):
    """No disk takes more than the first bytes of it."""
    train_run.run(job)
    good = (job.out / name).read_bytes()
    moved = os.replace

    def full(source, target):
        if source.name == name:
            raise OSError(28, "No space left on device")
        moved(source, target)

    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr(train_run, "_check_folder", lambda job: None)
    with pytest.raises(OSError, match="No space left"):
        train_run.run(job)
    assert (job.out / name).read_bytes() == good
    assert not list(job.out.glob("*partial*"))


def test_links_in_the_run_folder_are_kept(job, tmp_path):
    job.out.mkdir()
    for name in ("model", "packed", "curves.csv", "run.json"):
        (job.out / name).symlink_to(tmp_path / f"real {name}")
    for resume in (False, True):
        train_run.run(replace(job, resume=resume))
    assert {path.name for path in job.out.iterdir() if path.is_symlink()} == {
        *("model", "packed", "curves.csv", "run.json")
    }
    assert Decoder.from_pretrained(tmp_path / "real model").config.dim == SHAPE.dim
    assert not [*job.out.glob("*.trapline.*"), *tmp_path.glob("*.trapline.*")]


def test_full_disk_keeps_the_last_model(job, monkeypatch):
    train_run.run(job)
    good = (job.out / "model" / "model.safetensors").read_bytes()
    state = (job.out / train_run.CHECKPOINT).read_bytes()

    def full(self, folder, **rest):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Decoder, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        train_run.run(replace(job, resume=True))
    assert (job.out / "model" / "model.safetensors").read_bytes() == good
    assert (job.out / train_run.CHECKPOINT).read_bytes() == state
    assert not list(job.out.glob("*partial*"))


def test_failed_writes_raise_os_error(job, monkeypatch):
    """No file may grow beyond some bytes: neither the state nor the model can be saved."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = train_run.make_trainer(job, train_run.prepare(job))
    job.out.mkdir()
    decoder = trainer.model.decoder
    # What is imported meanwhile must not be cached: its file would be cut as well.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(OSError, match="could not be written whole"):
            trainer.save(job.out / train_run.CHECKPOINT)
        with pytest.raises(OSError, match="could not be written whole"):
            write_folder(
                job.out / "model", lambda place: train_run._save_dense(decoder, None, place)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(job.out.iterdir())


@pytest.mark.full
def test_two_processes_match_one(job, tmp_path):
    """torchrun with gloo: half the batch each, the same model as one process with all of it."""
    one = replace(job, recipe=replace(RECIPE, batch=8))
    train_run.run(one)
    size = ["--vocab", "280", "--dim", "16", "--layers", "1", "--heads", "2", "--context", "12"]
    steps = ["--steps", "24", "--batch", "4", "--evaluate-every", "8", "--warm-up", "4"]
    rest = ["--rate", "0.1", "--final-rate", "0.005", "--held-out", "0.2", "--device", "cpu"]
    program = f"{os.path.dirname(sys.executable)}/trapline"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "--no-python", program, "train", str(job.texts[0])]
    command += ["--out", str(tmp_path / "two"), *size, *steps, *rest]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, pair = (
        json.loads((folder / "run.json").read_text()) for folder in (one.out, tmp_path / "two")
    )
    assert pair["best_loss"] == pytest.approx(alone["best_loss"], abs=5e-3)


@pytest.mark.full
def test_compiled_training_matches_plain(job):
    plain = train_run.make_trainer(job, train_run.prepare(job))
    plain.run()
    fused = replace(job, recipe=replace(RECIPE, compile=True))
    compiled = train_run.make_trainer(fused, train_run.prepare(fused))
    compiled.run()
    assert compiled.progress.best_loss == pytest.approx(plain.progress.best_loss, abs=2e-2)
