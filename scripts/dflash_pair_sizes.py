"""Shapes of a target and its drafter, and for how long both are trained."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shapes and lengths of training; what is not said is that of the tiny pair."""

    vocab: int = 512
    dim: int = 96
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 256
    context: int = 256
    window: int = 64
    steps: int = 500
    batch: int = 8
    rate: float = 0.2  # relative to a typical weight, as all rates here
    megabytes: float = 0.4
    drafter_layers: int = 2
    drafter_hidden: int = 256
    seen: int = 2  # target layers that the drafter looks at
    block: int = 8
    prompts: int = 192
    prompt: int = 32
    answer: int = 48
    drafter_steps: int = 300
    drafter_batch: int = 8
    anchors: int = 16
    drafter_rate: float = 0.1
    #: How much of the drafter's loss is the target's whole law.
    soft: float = 0.0


SIZES = {
    # Learns nothing: shows in seconds that everything fits together.
    "toy": Size(
        vocab=300,
        dim=32,
        layers=2,
        hidden=48,
        window=32,
        steps=4,
        batch=4,
        rate=0.1,
        megabytes=0.05,
        drafter_layers=1,
        drafter_hidden=48,
        seen=1,
        block=6,
        prompts=12,
        answer=12,
        drafter_steps=4,
        drafter_batch=4,
        anchors=8,
    ),
    # Minutes on a CPU.
    "tiny": Size(),
    # Deep and narrow: a pass over few rows costs what its kernels cost to start, so depth is what
    # a drafter saves. Few and short tokens, two characters each: most follow from those before.
    "small": Size(
        dim=256,
        layers=24,
        hidden=768,
        context=1024,
        window=512,
        steps=2500,
        batch=64,
        rate=0.16,
        megabytes=80.0,
        drafter_hidden=2048,
        seen=4,
        prompts=40960,
        prompt=64,
        answer=128,
        drafter_steps=8000,
        drafter_batch=128,
        anchors=32,
    ),
}
