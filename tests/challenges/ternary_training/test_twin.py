"""The cached figure of the dense twin: what the gold trainer reaches without its quantiser."""

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trapline.challenges import ternary_training
from trapline.challenges.ternary_training import cases, situations
from trapline.gold.ternary import small_lm

SOLUTION = Path(ternary_training.__file__).parent / "solution"
#: Looks at the clock in ten steps of training: one a step, and one to go on.
LOOKS = 11


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The gold trainer with a clock that ticks once a look: the same steps on every machine."""
    monkeypatch.syspath_prepend(SOLUTION)
    module = importlib.import_module("training")
    ticks = itertools.count()
    monkeypatch.setattr(module, "time", _Clock(lambda: float(next(ticks))))
    monkeypatch.setattr(module, "PATIENCE", 1000)
    yield module
    for name in ("model", "training"):
        del sys.modules[name]


class _Clock:
    def __init__(self, monotonic: object) -> None:
        self.monotonic = monotonic


def _excess(training: ModuleType, seed: int) -> float:
    """Perplexity on unseen documents of the grammar over that of the grammar itself."""
    rng = np.random.default_rng(seed)
    grammar = situations.Grammar(rng, situations.VOCAB)
    config = situations.config_of(rng, seconds=15 * LOOKS)
    shown, unseen = grammar.documents(rng, 200, 33), grammar.documents(rng, 60, 33)
    weights = training.fit(shown[30:], shown[:30], config, lambda w: w)
    wide = {name: value.astype(np.float64) for name, value in weights.items()}
    truth = np.exp(-np.mean(np.concatenate([grammar.log_probs(d) for d in unseen])))
    return small_lm.perplexity(wide, unseen, config) / float(truth)


@pytest.mark.full
def test_the_twins_figure_is_what_the_trainer_gives(training: ModuleType) -> None:
    excess = np.mean([_excess(training, seed) for seed in range(2)])
    assert abs(excess - cases.DENSE_TWIN_EXCESS) < 0.06
