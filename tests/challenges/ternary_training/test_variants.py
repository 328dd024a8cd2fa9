"""Which model trained weights were made for."""

from types import SimpleNamespace

import numpy as np
import pytest

from trapline.challenges.ternary_training import variants
from trapline.challenges.ternary_training.variants import JUDGED, Variant


class Answer:
    """Stands for a submission; the measurements of the variants are given."""


@pytest.mark.parametrize(
    ("model", "share", "unigram", "trap"),
    [
        # Half-trained weights of a right answer do a little better where they see the future.
        (Variant(ahead=1), 0.951, 30.0, ""),
        (Variant(ahead=1), 0.07, 30.0, "future-visible"),
        (Variant(norm_before_head=False), 0.951, 30.0, "head-without-norm"),
        (Variant(norm_before_head=False), 0.98, 30.0, ""),
        # Weights that have hardly learned anything do better without this norm, too.
        (Variant(norm_before_head=False), 0.90, 11.0, ""),
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
def test_no_missing_norm_where_another_sharpness_does_as_well(factor, monkeypatch):
    """Half-trained weights are not sure enough, those that know their documents too sure."""
    without_norm, scaled = Variant(norm_before_head=False), Variant(sharpness=factor)
    perplexities = {JUDGED: 10.0, without_norm: 8.0, scaled: 8.5}
    run = SimpleNamespace(tensors={}, config={}, unseen=[], unigram=30.0)
    monkeypatch.setattr(variants, "trained", lambda *_: run)
    monkeypatch.setattr(variants, "weights_of", lambda *_: {})
    monkeypatch.setattr(variants, "perplexity", lambda w, d, c, m: perplexities.get(m, 20.0))
    assert variants.best_fit(Answer(), np.random.default_rng(0)).trap == "head-without-norm"
    perplexities[scaled] = 7.5
    assert variants.best_fit(Answer(), np.random.default_rng(0)).trap == ""
