"""Shapes of a target and its drafter, and for how long both are trained."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shapes and lengths of training."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    context: int
    window: int
    steps: int
    batch: int
    rate: float  # relative to a typical weight, as all rates here
    megabytes: float
    drafter_layers: int
    drafter_hidden: int
    seen: int  # target layers that the drafter looks at
    block: int
    prompts: int
    prompt: int
    answer: int
    drafter_steps: int
    drafter_batch: int
    anchors: int
    drafter_rate: float
    #: How much of the drafter's loss is the target's whole law.
    soft: float = 0.0


SIZES = {
    # Learns nothing: shows in seconds that everything fits together.
    "toy": Size(
        vocab=300,
        dim=32,
        layers=2,
        heads=4,
        kv_heads=2,
        hidden=48,
        context=256,
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
        prompt=32,
        answer=12,
        drafter_steps=4,
        drafter_batch=4,
        anchors=8,
        drafter_rate=0.1,
    ),
    "tiny": Size(
        vocab=512,
        dim=96,
        layers=3,
        heads=4,
        kv_heads=2,
        hidden=256,
        context=256,
        window=64,
        steps=500,
        batch=8,
        rate=0.2,
        megabytes=0.4,
        drafter_layers=2,
        drafter_hidden=256,
        seen=2,
        block=8,
        prompts=192,
        prompt=32,
        answer=48,
        drafter_steps=300,
        drafter_batch=8,
        anchors=16,
        drafter_rate=0.1,
    ),
    # Deep and narrow: a pass over few rows costs what its kernels cost to start, so depth is what
    # a drafter saves. Few and short tokens, two characters each: most follow from those before.
    "small": Size(
        vocab=512,
        dim=256,
        layers=24,
        heads=4,
        kv_heads=2,
        hidden=768,
        context=1024,
        window=512,
        steps=2500,
        batch=64,
        rate=0.16,
        megabytes=80.0,
        drafter_layers=2,
        drafter_hidden=2048,
        seen=4,
        block=8,
        prompts=40960,
        prompt=64,
        answer=128,
        drafter_steps=8000,
        drafter_batch=128,
        anchors=32,
        drafter_rate=0.1,
    ),
}
