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

#: Bytes of features that are computed once and kept.
REMEMBERED = 16 << 30


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
    from trapline.gold.tree_decoding.generate_compact import CompactGenerator
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


def before_loops(text: Text, width: int = 8) -> Text:
    """The text up to where its answer first says eight tokens that it said before.

    Small targets end in loops. A drafter that learns loops learns nothing else.
    """
    answer, seen = text.tokens[text.start :], set[tuple[int, ...]]()
    for at in range(len(answer) - width + 1):
        gram = tuple(answer[at : at + width])
        if gram in seen:
            return Text(text.tokens[: text.start + at + width - 1], text.start)
        seen.add(gram)
    return text


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
    lesson = Lesson(usable, target, model.config.target_layers)
    losses: list[float] = []
    started = time.perf_counter()
    while (gone := _gone(len(losses), time.perf_counter() - started, config)) < 1.0:
        picked = torch.randint(len(usable), (config.batch,), generator=luck)
        batch = lesson.draw(picked, config.anchors, model.config.block, luck)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * schedule(gone, config)
        loss = block_loss(model, target, batch, lesson.features(picked), config.decay)
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


class Lesson:
    """All texts as tensors beside the target, and what its layers say of them."""

    def __init__(self, texts: Sequence[Text], target: Decoder, layers: Sequence[int]) -> None:
        self._target, self._layers = target, tuple(layers)
        device = target.device
        longest = max(len(text.tokens) for text in texts)
        padded = [text.tokens + [0] * (longest - len(text.tokens)) for text in texts]
        self.ids = torch.tensor(padded, device=device)
        self.starts = torch.tensor([text.start for text in texts], device=device)
        self.lengths = torch.tensor([len(text.tokens) for text in texts], device=device)
        self._known: Tensor | None = None
        size = target.norm.weight.element_size() * target.config.dim * len(self._layers)
        if self.ids.numel() * size <= REMEMBERED:
            # A text is drawn many times: its features are computed once.
            pieces = [self._computed(ids) for ids in torch.split(self.ids, 64)]
            self._known = torch.cat(pieces)

    def features(self, picked: Tensor) -> Tensor:
        """(R, T, layers · C) of these texts."""
        picked = picked.to(self.ids.device)
        return self._computed(self.ids[picked]) if self._known is None else self._known[picked]

    @torch.no_grad()
    def _computed(self, ids: Tensor) -> Tensor:
        # Padding stands behind a text, where nothing of the text can see it.
        run = self._target.run(list(ids), [_Nothing() for _ in ids], features=self._layers)
        return torch.cat(run.features, dim=-1).view(*ids.shape, -1)

    def draw(self, picked: Tensor, count: int, slots: int, luck: torch.Generator) -> Blocks:
        """Random anchors at or after the last prompt token, with at least one token behind them."""
        chance = torch.rand((len(picked), count), generator=luck).to(self.ids.device)
        picked = picked.to(self.ids.device)
        ids, lengths = self.ids[picked], self.lengths[picked]
        first, end = (self.starts[picked] - 1).clamp(min=0), lengths - 1
        anchors = first[:, None] + (chance * (end - first)[:, None]).long()
        slot = torch.arange(slots, device=ids.device)
        places = anchors[:, :, None] + slot
        judged = (places < lengths[:, None, None]) & (slot > 0)
        labels = ids.gather(1, places.clamp(max=ids.shape[1] - 1).flatten(1)).view(places.shape)
        return Blocks(ids, anchors, labels, judged)


class _Nothing:
    """A cache that keeps nothing: whole texts go through in one pass."""

    length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return k, v

    def advance(self, count: int) -> None:
        """There is nothing to count."""


def block_loss(
    model: DFlash, target: Decoder, batch: Blocks, features: Tensor, decay: float
) -> Tensor:
    """Weighted cross-entropy of all judged slots, a weighted mean."""
    labels, kind = batch.labels, model.norm.weight.dtype
    slots = torch.arange(labels.shape[2], device=labels.device)
    with torch.no_grad():
        blocks = target.embedding(torch.where(slots > 0, model.config.mask_id, labels)).to(kind)
    hidden = model.train_hidden(features.to(kind), blocks, batch.anchors)
    logits = functional.linear(hidden[:, :, 1:], target.head.weight.to(kind)).float()
    each = functional.cross_entropy(
        logits.flatten(0, 2), labels[:, :, 1:].flatten(), reduction="none"
    )
    weights = torch.exp(-slots[:-1] / decay) * batch.judged[:, :, 1:]
    return (each * weights.flatten()).sum() / weights.sum()
