"""Which model trained weights were made for: that of the contract, or of a known bug."""

from types import SimpleNamespace

import numpy as np
import pytest

from trapline.challenges.ternary_training import situations, variants
from trapline.challenges.ternary_training.variants import JUDGED, VARIANTS, Variant
from trapline.gold.ternary import small_lm

CONFIG = {"vocab": 11, "dim": 12, "layers": 2, "heads": 4, "context": 9}
EVERY = [JUDGED, Variant(distance_added=True), Variant(later_mlps="none"), Variant(first_head=0)]
EVERY += [model for _, model in VARIANTS]


@pytest.fixture
def weights():
    rng = np.random.default_rng(1)
    shapes = small_lm.tensor_shapes(CONFIG).items()
    return {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes}


@pytest.fixture
def documents():
    rng = np.random.default_rng(2)
    return [rng.integers(0, 11, length).tolist() for length in (9, 5, 9, 10, 5, 7)]


def test_the_judged_model_is_that_of_the_contract(weights, documents):
    right = small_lm.perplexity(weights, documents, CONFIG)
    assert variants.perplexity(weights, documents, CONFIG, JUDGED) == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("model", EVERY)
def test_documents_do_not_see_each_other(weights, documents, model):
    alone = [
        (len(document), variants.perplexity(weights, [document], CONFIG, model))
        for document in documents
    ]
    cut = {"same": 0, "second next": 2}.get(model.target, 1)
    counts = np.array([length - cut for length, _ in alone])
    mean = np.sum(counts * np.log([one for _, one in alone])) / counts.sum()
    found = variants.perplexity(weights, documents, CONFIG, model)
    assert found == pytest.approx(np.exp(mean), rel=1e-6)


def test_every_variant_is_another_model(weights, documents):
    found = [variants.perplexity(weights, documents, CONFIG, model) for model in EVERY]
    assert len(set(np.round(found, 6))) == len(EVERY)


@pytest.mark.parametrize(("waited", "asked"), [(0.001, 2.0), (0.2, 8.0)])
def test_waiting_for_other_cells_does_not_lengthen_a_training(monkeypatch, waited, asked):
    """Only waiting for a processor does."""

    class Wait:
        def seconds(self):
            return waited

    clock = iter([0.0, 0.3])
    monkeypatch.setattr(situations, "ProcessorWait", Wait)
    monkeypatch.setattr(situations, "_exercise", lambda: None)
    monkeypatch.setattr(situations.time, "perf_counter", lambda: next(clock))
    assert situations.unhurried(2.0) == pytest.approx(asked, abs=0.5)


class Answer:
    """Stands for a submission; the measurements of the variants are given."""


@pytest.mark.parametrize(
    ("model", "share", "unigram", "trap"),
    [
        # Half-trained weights of a right answer do a little better where they see the future.
        (Variant(ahead=1), 0.951, 30.0, ""),
        (Variant(ahead=1), 0.07, 30.0, "future-visible"),
        (Variant(norm_before_head=False), 0.951, 45.0, "head-without-norm"),
        (Variant(norm_before_head=False), 0.98, 45.0, ""),
        # Weights that have learned little do better without this norm, too.
        (Variant(norm_before_head=False), 0.90, 11.0, ""),
        (Variant(norm_before_head=False), 0.75, 22.0, ""),
    ],
)
def test_each_variant_must_be_better_by_more_than_right_answers_reach(
    model, share, unigram, trap, monkeypatch
):
    perplexities = {JUDGED: 10.0, model: 10.0 * share}
    run = SimpleNamespace(tensors={}, config={}, unseen=[], unigram=unigram)
    monkeypatch.setattr(variants, "trained", lambda *_: run)
    monkeypatch.setattr(variants, "weights_of", lambda *_: {})
    monkeypatch.setattr(variants, "perplexity", lambda w, d, c, m: perplexities.get(m, 20.0))
    assert variants.best_fit(Answer(), np.random.default_rng(0)).trap == trap


@pytest.mark.parametrize("factor", variants.SHARPNESS)
def test_no_missing_norm_where_another_sharpness_does_better(factor, monkeypatch):
    """Half-trained weights are not sure enough, those that know their documents too sure."""
    without_norm, scaled = Variant(norm_before_head=False), Variant(sharpness=factor)
    perplexities = {JUDGED: 10.0, without_norm: 8.0, scaled: 7.9}
    run = SimpleNamespace(tensors={}, config={}, unseen=[], unigram=40.0)
    monkeypatch.setattr(variants, "trained", lambda *_: run)
    monkeypatch.setattr(variants, "weights_of", lambda *_: {})
    monkeypatch.setattr(variants, "perplexity", lambda w, d, c, m: perplexities.get(m, 20.0))
    assert variants.best_fit(Answer(), np.random.default_rng(0)).trap == "head-without-norm"
    perplexities[scaled] = 7.0
    assert variants.best_fit(Answer(), np.random.default_rng(0)).trap == ""
