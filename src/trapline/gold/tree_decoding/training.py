"""Training of a drafter on the answers of its target.

The target first answers prompts itself, since the drafter must predict this model and not the
language. Each step then places blocks at random anchors of these texts. A block sees the target's
hidden states strictly before its anchor; the weights of its slots in the loss fall exponentially,
since tokens behind a wrong one are rejected anyway.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trapline.gold import checks
from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.capture import captured
from trapline.gold.decoder.generate import generate
from trapline.gold.decoder.sampling import Sampling
from trapline.gold.errors import RangeError
from trapline.gold.ternary.training.optimizers import Recipe, make_optimisers
from trapline.gold.tree_decoding.bulk_answers import EqualRows, read
from trapline.gold.tree_decoding.drafter import DFlash, DrafterConfig


@dataclass(frozen=True)
class TrainingConfig:
    """How a drafter is trained. `decay` is γ of the weights exp(−(k − 1) / γ).

    With `seconds` the schedule follows the clock, preparations included, instead of `steps`.
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
    #: "adamw", or "muon" with rates relative to a matrix's typical weight.
    optimiser: str = "adamw"
    #: Weight of the target's distribution beside its token in the loss.
    soft: float = 0.0
    #: Whether to compile on a GPU; it takes half a minute.
    compile: bool = False
    #: Whether a GPU captures loss and gradients of a step as one graph.
    capture: bool = True
    #: Steps between reading the loss, which waits for the device.
    look: int = 1

    def __post_init__(self) -> None:
        checks.integer_between(1, 2**31, steps=self.steps, batch=self.batch, anchors=self.anchors)
        checks.integer_between(1, 2**31, look=self.look)
        checks.positive(learning_rate=self.learning_rate, decay=self.decay, clip=self.clip)


@dataclass(frozen=True)
class Text:
    """An answer of the target: `tokens` with the prompt, supervised from `start` on."""

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
    """The target's answers; prompt i has temperature i modulo their number."""
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


def regenerate_in_bulk(
    target: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float] = (0.0,),
    seed: int = 0,
    batch: int = 2048,
) -> list[Text]:
    """The same for prompts of one length, thousands at once; those that fill no batch are left out.

    On a GPU millions of tokens take seconds. Sampled answers have the target's law, but other luck
    than `regenerate`.
    """
    rows = min(batch, len(prompts))
    together = EqualRows(target, rows, len(prompts[0]) + max_new_tokens, seed=seed)
    found: list[Text] = []
    for at in range(0, len(prompts) - rows + 1, rows):
        some = torch.tensor(prompts[at : at + rows], device=target.device)
        said = together.answer(some, max_new_tokens, temperatures).tolist()
        found += [Text(tokens, some.shape[1]) for tokens in said]
    return found


def _texts(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[Text]:
    return [
        Text([*prompt, *answer], len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def repeats(answer: Sequence[int], width: int = 8) -> bool:
    """Whether less than 70 % of its eight-grams are distinct: the answer loops."""
    grams = [tuple(answer[at : at + width]) for at in range(len(answer) - width + 1)]
    return bool(grams) and len(set(grams)) < 0.7 * len(grams)


def before_loops(text: Text, width: int = 8) -> Text:
    """The text up to the first repetition of eight tokens in its answer.

    Small targets end in loops, and a drafter trained on loops learns little else.
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
    """Train in place; returns every `look`th loss."""
    begun = time.perf_counter()
    model.check_fits(target)
    # An anchor needs a token of the answer after it.
    usable = [text for text in texts if len(text.tokens) - text.start >= 2]
    if not usable:
        raise RangeError("at least one text must have two tokens of the target's answer")
    target.requires_grad_(False)
    model.train()
    lesson = Lesson(usable, target, model.config.target_layers)
    gradients = _gradients(model, target, lesson, config)
    optimisers = _optimisers(model, config)
    luck = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    step, started = 0, time.perf_counter()
    end = None if config.seconds is None else begun + config.seconds
    while (gone := _gone(step, started, end, config)) < 1.0:
        # The first number of a row picks its text, the others its anchors.
        shape = (config.batch, 1 + config.anchors)
        loss = gradients(torch.rand(shape, generator=luck, dtype=torch.float64))
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                size = group.get("unit", 1.0)
                group["lr"] = size * config.learning_rate * schedule(gone, config)
            optimiser.step()
        if step % config.look == 0:
            losses.append(float(loss))
            report(step, losses[-1])
        step += 1
    model.eval()
    return losses


def _optimisers(model: DFlash, config: TrainingConfig) -> list[Any]:
    if config.optimiser == "muon":
        return make_optimisers(model, Recipe(optimiser="muon"))
    on_gpu = model.norm.weight.is_cuda
    rate = config.learning_rate
    return [torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=on_gpu)]


def _gradients(
    model: DFlash, target: Decoder, lesson: "Lesson", config: TrainingConfig
) -> Callable[[Tensor], Tensor]:
    """Loss and clipped gradients of a random batch; on a GPU one graph."""
    device = target.device
    luck = torch.zeros((config.batch, 1 + config.anchors), dtype=torch.float64, device=device)
    found = torch.zeros((), dtype=torch.float32, device=device)

    def work() -> None:
        model.zero_grad(set_to_none=True)
        # A cache of cast weights would outlive the graph that made it.
        with torch.autocast("cuda", torch.bfloat16, enabled=luck.is_cuda, cache_enabled=False):
            loss = block_loss(model, target, lesson.draw(luck, model.config.block), config)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        found.copy_(loss.detach())

    replay: Callable[[], object] = work
    if luck.is_cuda and config.compile:
        model.compile_training()
    if luck.is_cuda and config.capture:
        replay = captured(work, (), luck.device).replay

    def compute(drawn: Tensor) -> Tensor:
        luck.copy_(drawn)
        replay()
        return found

    return compute


def _gone(step: int, started: float, end: float | None, config: TrainingConfig) -> float:
    """Progress of the training from 0 to 1; at least one step is made."""
    if end is None:
        return step / config.steps
    now = time.perf_counter()
    return min(1.0, (now - started) / max(1e-9, end - started)) if step else 0.0


def schedule(gone: float, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine decay to zero."""
    if gone < config.warm_up:
        return (gone + 1.0 / config.steps) / (config.warm_up + 1.0 / config.steps)
    left = max(1e-9, 1.0 - config.warm_up)
    return 0.5 * (1.0 + math.cos(math.pi * (gone - config.warm_up) / left))


@dataclass(frozen=True)
class Blocks:
    """A batch: A anchors in each of R texts of T tokens with padding, K slots a block."""

    features: Tensor  # (R, T, layers · C)
    anchors: Tensor  # (R, A)
    labels: Tensor  # (R, A, K) the token of each slot
    judged: Tensor  # (R, A, K) bool: behind the anchor, inside the text
    before: Tensor  # (R, A, K − 1, C) what the target's head read when it said slots 1 …


class Lesson:
    """All texts as tensors, with the target's features, which are computed once."""

    def __init__(self, texts: Sequence[Text], target: Decoder, layers: Sequence[int]) -> None:
        device = target.device
        longest = max(len(text.tokens) for text in texts)
        padded = [text.tokens + [0] * (longest - len(text.tokens)) for text in texts]
        self.ids = torch.tensor(padded, device=device)
        self.starts = torch.tensor([text.start for text in texts], device=device)
        self.lengths = torch.tensor([len(text.tokens) for text in texts], device=device)
        like, wide = target.norm.weight, target.config.dim
        self.features = like.new_empty((*self.ids.shape, len(layers) * wide))
        self.last = like.new_empty((*self.ids.shape, wide))
        # Padding stands behind a text, where nothing of the text can see it.
        for at in range(0, len(texts), READ_AT_ONCE):
            some = slice(at, at + READ_AT_ONCE)
            said = read(target, self.ids[some], seen=layers)
            self.features[some], self.last[some] = said.features, said.last

    def draw(self, luck: Tensor, slots: int) -> Blocks:
        """Luck is (R, 1 + A) numbers in [0, 1): of a row the first picks the text, the others its
        anchors, at or after the last prompt token, with at least one token behind them."""
        luck = luck.to(self.ids.device)
        picked, chance = (luck[:, 0] * len(self.ids)).long(), luck[:, 1:]
        ids, lengths = self.ids[picked], self.lengths[picked]
        first, end = (self.starts[picked] - 1).clamp(min=0), lengths - 1
        anchors = first[:, None] + (chance * (end - first)[:, None]).long()
        slot = torch.arange(slots, device=ids.device)
        places = anchors[:, :, None] + slot
        judged = (places < lengths[:, None, None]) & (slot > 0)
        inside = places.clamp(max=ids.shape[1] - 1)
        labels = ids.gather(1, inside.flatten(1)).view(places.shape)
        before = self.last[picked[:, None, None], inside[:, :, :-1]]
        return Blocks(self.features[picked], anchors, labels, judged, before)


#: Texts of which features are computed at once.
READ_AT_ONCE = 256


def block_loss(model: DFlash, target: Decoder, batch: Blocks, config: TrainingConfig) -> Tensor:
    """Of all judged slots the weighted mean of cross-entropy with the text, and by a share
    `config.soft` with the whole law that the target had there."""
    labels, kind = batch.labels, model.norm.weight.dtype
    slots = torch.arange(labels.shape[2], device=labels.device)
    with torch.no_grad():
        blocks = target.embed(labels.masked_fill(slots > 0, model.config.mask_id)).to(kind)
        head = target.head.weight.to(kind)
    hidden = model.train_hidden(batch.features.to(kind), blocks, batch.anchors)
    guesses = target.capped(functional.linear(hidden[:, :, 1:], head).float())
    logs = torch.log_softmax(guesses, dim=-1)
    each = -logs.gather(-1, labels[:, :, 1:, None])[..., 0]
    if config.soft:
        with torch.no_grad():
            logits = target.capped(functional.linear(batch.before.to(kind), head).float())
            law = torch.softmax(logits, dim=-1)
        each = (1.0 - config.soft) * each - config.soft * (law * logs).sum(dim=-1)
    weights = torch.exp(-slots[:-1] / config.decay) * batch.judged[:, :, 1:]
    return (each * weights).sum() / weights.sum()
