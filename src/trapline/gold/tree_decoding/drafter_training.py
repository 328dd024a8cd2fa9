"""Training a drafter on what its target says.

The target first answers prompts itself (a drafter learns one speaker, not the language). Then, in
every step, blocks are put behind random anchors of these texts; a block sees the target's hidden
states strictly before its anchor, and its slots are judged against the text with weights that fall
exponentially: what comes behind a wrong token is thrown away anyway.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold import checks
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.errors import RangeError
from trapline.gold.tree_decoding.drafter import DFlash, DrafterConfig


@dataclass(frozen=True)
class TrainingConfig:
    """How a drafter is trained. `decay` is γ of the weights exp(−(k − 1) / γ).

    With `seconds` the clock decides: the rate falls to zero when they are over, whatever the
    number of steps.
    """

    steps: int = 300
    batch: int = 8
    anchors: int = 16
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    decay: float = 4.0
    clip: float = 1.0
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        checks.integer_between(1, 2**31, steps=self.steps, batch=self.batch, anchors=self.anchors)
        checks.positive(learning_rate=self.learning_rate, decay=self.decay, clip=self.clip)


@dataclass(frozen=True)
class Text:
    """What the target said: `tokens` with the prompt, supervised from `start` on."""

    tokens: list[int]
    start: int


def fresh(config: DrafterConfig, seed: int) -> DFlash:
    """An untrained drafter, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DFlash(config)


def regenerate(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float] = (0.0,),
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    batch: int = 64,
) -> list[Text]:
    """The target's own answers, the temperatures in turn."""
    ways = [
        Sampling(temperature=temperatures[number % len(temperatures)], seed=seed + number)
        for number in range(len(prompts))
    ]
    answers = generate(
        target,
        prompts,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        sampling=ways,
        batch=batch,
    )
    return _texts(prompts, answers)


def regenerate_in_rounds(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
    batch: int = 512,
) -> list[Text]:
    """The same on a GPU, for prompts of any lengths: the host does not look at single tokens.

    Prompts that do not fill a batch are left out.
    """
    from trapline.gold.tree_decoding.compact_generate import CompactGenerator
    from trapline.gold.tree_decoding.generate_static import StaticConfig

    rows = min(batch, len(prompts) // len(temperatures))
    room = max(map(len, prompts)) + max_new_tokens + 2
    share = len(prompts) // len(temperatures) // rows * rows
    found: list[Text] = []
    for number, temperature in enumerate(temperatures):
        rounds = CompactGenerator(target, None, StaticConfig(rows, room, temperature, seed))
        for at in range(number * share, (number + 1) * share, rows):
            some = prompts[at : at + rows]
            answers = rounds.generate(some, max_new_tokens=max_new_tokens).tokens
            found += _texts(some, answers)
            rounds.rounds.state.seeds += rows
    return found


def _texts(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Text]:
    return [
        Text([*prompt, *answer], len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def repeats(answer: Sequence[int], width: int = 8) -> bool:
    """Whether less than seven tenths of its eight-grams are different: it is caught in a loop."""
    grams = [tuple(answer[at : at + width]) for at in range(len(answer) - width + 1)]
    return bool(grams) and len(set(grams)) < 0.7 * len(grams)


def train(
    model: DFlash,
    target: Decoder,
    texts: Sequence[Text],
    config: TrainingConfig,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Trains in place; the loss of every step."""
    model.check_fits(target)
    # An anchor needs one token behind it that the target said.
    usable = [text for text in texts if len(text.tokens) - text.start >= 2]
    if not usable:
        raise RangeError("no text has two tokens of the target's own")
    target.requires_grad_(False)
    model.train()
    on_gpu = target.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=on_gpu
    )
    luck = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    started = time.perf_counter()
    while (gone := _gone(len(losses), time.perf_counter() - started, config)) < 1.0:
        picked = torch.randint(len(usable), (config.batch,), generator=luck).tolist()
        batch = draw_blocks([usable[i] for i in picked], config.anchors, model.config.block, luck)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * schedule(gone, config)
        loss = block_loss(model, target, batch, config.decay)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        report(len(losses) - 1, losses[-1])
    model.eval()
    return losses


def _gone(step: int, seconds: float, config: TrainingConfig) -> float:
    """How much of the training is over, from 0 to 1. One step is always made."""
    if config.seconds is None:
        return step / config.steps
    return min(1.0, seconds / config.seconds) if step else 0.0


def schedule(gone: float, config: TrainingConfig) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if gone < config.warm_up:
        return (gone + 1.0 / config.steps) / (config.warm_up + 1.0 / config.steps)
    left = max(1e-9, 1.0 - config.warm_up)
    return 0.5 * (1.0 + math.cos(math.pi * (gone - config.warm_up) / left))


@dataclass(frozen=True)
class Blocks:
    """A batch: R padded texts, A anchors in each."""

    ids: Tensor  # (R, T), padded with 0
    anchors: Tensor  # (R, A)
    labels: Tensor  # (R, A, K) the token of each slot
    judged: Tensor  # (R, A, K) bool: behind the anchor, inside the text


def draw_blocks(texts: Sequence[Text], count: int, slots: int, luck: torch.Generator) -> Blocks:
    """Random anchors at or after the last prompt token, with at least one token behind them."""
    longest = max(len(text.tokens) for text in texts)
    ids = torch.zeros((len(texts), longest), dtype=torch.long)
    anchors = torch.zeros((len(texts), count), dtype=torch.long)
    lengths = torch.tensor([len(text.tokens) for text in texts])
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = torch.tensor(text.tokens)
        first, end = max(text.start - 1, 0), len(text.tokens) - 1
        anchors[row] = torch.randint(first, end, (count,), generator=luck)
    places = anchors[:, :, None] + torch.arange(slots)
    judged = (places < lengths[:, None, None]) & (torch.arange(slots) > 0)
    labels = ids.gather(1, places.clamp(max=longest - 1).flatten(1)).view(places.shape)
    return Blocks(ids, anchors, labels, judged)


class _Nothing:
    """A cache that keeps nothing: whole texts go through in one pass."""

    length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return k, v

    def advance(self, count: int) -> None:
        """There is nothing to count."""


def block_loss(model: DFlash, target: Decoder, batch: Blocks, decay: float) -> Tensor:
    """Weighted cross-entropy of all judged slots, a weighted mean."""
    device = target.device
    ids, anchors = batch.ids.to(device), batch.anchors.to(device)
    labels, judged = batch.labels.to(device), batch.judged.to(device)
    with torch.no_grad():
        # Padding stands behind a text, where nothing of the text can see it.
        run = target.run(list(ids), [_Nothing() for _ in ids], features=model.config.target_layers)
        kind = model.norm.weight.dtype
        features = torch.cat(run.features, dim=-1).view(*ids.shape, -1).to(kind)
        masked = torch.where(
            torch.arange(labels.shape[2], device=device) > 0, model.config.mask_id, labels
        )
        blocks = target.embedding(masked).to(kind)
    hidden = model.train_hidden(features, blocks, anchors)
    logits = functional.linear(hidden[:, :, 1:], target.head.weight.to(kind)).float()
    each = functional.cross_entropy(
        logits.flatten(0, 2), labels[:, :, 1:].flatten(), reduction="none"
    )
    slots = torch.arange(labels.shape[2] - 1, device=device)
    weights = torch.exp(-slots / decay) * judged[:, :, 1:]
    return (each * weights.flatten()).sum() / weights.sum()
