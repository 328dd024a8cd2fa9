"""Training must end in time; waiting for a processor neither fails an answer nor saves one."""

import numpy as np
import pytest

from trapline.arena.errors import Violation
from trapline.challenges.ternary_training import traps_training


class Trainer:
    """Reads the clock before each pass over the documents, which is far too rarely.

    In its first training other programs have the processor until the time is over.
    """

    def __init__(self, waits):
        self.waits, self.now, self.waited = waits, 0.0, 0.0
        self.asked = []

    def train(self, documents, config):
        self.asked.append(config["seconds"])
        if self.waits and len(self.asked) == 1:
            self.waited += config["seconds"]
        else:
            self.now += 100.0
        self.now += 0.2

    def processor_wait(self):
        return self

    def seconds(self):
        return self.waited

    def monotonic(self):
        return self.now + self.waited


@pytest.mark.parametrize("waits", [False, True])
def test_a_clock_read_rarely_is_found_on_a_busy_machine_too(monkeypatch, waits):
    trainer = Trainer(waits)
    monkeypatch.setattr(traps_training, "time", trainer)
    monkeypatch.setattr(traps_training, "unhurried", float)
    with pytest.raises(Violation, match="far past the time"):
        traps_training.clock_read_once_a_pass.run(trainer, np.random.default_rng(1))
    assert trainer.asked == ([0.8, 2.0] if waits else [0.8])
