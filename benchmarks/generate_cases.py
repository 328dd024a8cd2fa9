"""The models and the calls that `bench_generate.py` compares: ours and Hugging Face's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from trapline.gold.decoder.api import Decoder
from trapline.gold.decoder.beams import Searcher
from trapline.gold.decoder.config import DecoderConfig, from_dict
from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.graphed_step import GraphedStep, StepRow
from trapline.gold.decoder.pool import Pool
from trapline.gold.decoder.rope_config import RopeConfig
from trapline.gold.decoder.sampling import Sampling, TokenSampler
from trapline.gold.decoder.weights import from_tensors

PAGE = 16
#: Generates this many new tokens for every prompt, by their library or ours.
Run = Callable[[int], list[list[int]]]


@dataclass(frozen=True)
class Shape:
    """A model's size."""

    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    tied: bool = False

    def theirs(self, context: int) -> transformers.LlamaConfig:
        return transformers.LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.dim,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.hidden,
            vocab_size=self.vocab,
            max_position_embeddings=context,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
        )

    def ours(self, context: int) -> DecoderConfig:
        return DecoderConfig(
            family="llama",
            vocab=self.vocab,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
            context=context,
            norm_eps=1e-6,
            tied=self.tied,
            rope=RopeConfig(),
        )

    def cache_bytes(self, tokens: int, size: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * size * tokens


ANCHOR = Shape("254M", 16, 1024, 16, 8, 64, 2816, 32_000)
LARGER = (
    Shape("1.7B", 28, 2048, 16, 8, 128, 6144, 151_936, tied=True),
    Shape("8B", 32, 4096, 32, 8, 128, 14_336, 128_256),
)
FOR_CPU = Shape("29M", 8, 384, 6, 3, 64, 1024, 16_000)
TINY = Shape("tiny", 2, 64, 4, 2, 16, 128, 500)


@dataclass(frozen=True)
class Job:
    """What is generated."""

    batch: int
    prompt: int
    new: int
    beams: int = 1

    @property
    def name(self) -> str:
        how = f"{self.beams} beams" if self.beams > 1 else "greedy"
        return f"batch {self.batch}, prompt {self.prompt}, {self.new} new, {how}"

    def prompts(self, vocab: int) -> list[list[int]]:
        seed = torch.Generator().manual_seed(0)
        return torch.randint(0, vocab, (self.batch, self.prompt), generator=seed).tolist()


def pair(shape: Shape, context: int, device: str, dtype: torch.dtype) -> tuple[Any, Decoder]:
    """The same random weights in transformers and here, drawn where they will be."""
    torch.manual_seed(0)
    with torch.device(device):
        theirs = transformers.AutoModelForCausalLM.from_config(shape.theirs(context), dtype=dtype)
    theirs.eval().requires_grad_(False)
    config = from_dict(theirs.config.to_dict())
    return theirs, from_tensors(Decoder, config, theirs.state_dict(), dtype, device).requires_grad_(
        False
    )


def random_decoder(shape: Shape, context: int, device: str) -> Decoder:
    """Ours alone, in bfloat16, for shapes that are only held against the bytes they read."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Decoder(shape.ours(context)).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)


def end_of(vocab: int) -> int:
    """The token that ends a beam, theirs and ours; greedy calls have none."""
    return vocab - 1


def peer(model: Any, job: Job, **options: Any) -> Run:
    """Their `generate`."""
    vocab = model.config.vocab_size
    prompts = torch.tensor(job.prompts(vocab), device=model.device)
    mask = torch.ones_like(prompts)
    if job.beams > 1:
        options["eos_token_id"] = end_of(vocab)

    def run(new: int) -> list[list[int]]:
        with torch.no_grad():
            found = model.generate(
                prompts,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=False,
                num_beams=job.beams,
                pad_token_id=0,
                **options,
            )
        return found[:, job.prompt :].tolist()

    return run


def ours(decoder: Decoder, job: Job) -> Run:
    return ours_beams(decoder, job) if job.beams > 1 else ours_greedy(decoder, job)


def ours_greedy(decoder: Decoder, job: Job) -> Run:
    """One engine for all calls: what is captured once is used again, as in a server."""
    pages = job.batch * (-(-(job.prompt + job.new) // PAGE))
    engine = Engine(decoder, rows=job.batch, pages=pages, page_size=PAGE)
    prompts = job.prompts(decoder.config.vocab)

    def run(new: int) -> list[list[int]]:
        numbers = [engine.add(prompt, max_new_tokens=new) for prompt in prompts]
        answers: dict[int, list[int]] = {number: [] for number in numbers}
        while engine.is_busy:
            for token in engine.step():
                answers[token.request].append(token.token)
        return [answers[number] for number in numbers]

    return run


def ours_beams(decoder: Decoder, job: Job) -> Run:
    """One searcher for each length, for all calls. The policy is the peer's: ids are compared."""
    prompts = job.prompts(decoder.config.vocab)
    end = end_of(decoder.config.vocab)
    searchers: dict[int, Searcher] = {}

    def run(new: int) -> list[list[int]]:
        if new not in searchers:
            rules = {"beam_width": job.beams, "max_new_tokens": new, "eos_id": end}
            searchers[new] = Searcher(decoder, **rules, policy="hf", n_best=1)
        return [list(best.tokens) for best, *_ in searchers[new](prompts)]

    return run


class Loaded:
    """A static step with all prompts of a job in its cache, to be repeated from there.

    `order` says which page of the pool is a sequence's next one.
    """

    def __init__(self, decoder: Decoder, job: Job, order: list[int] | None = None) -> None:
        self.prompts = job.prompts(decoder.config.vocab)
        each = -(-(job.prompt + job.new) // PAGE)
        dtype, device = decoder.norm.weight.dtype, decoder.device
        self.pool = Pool(decoder.config, each * job.batch, PAGE, dtype, device)
        if order is not None:
            self.pool.book._free = list(order)
        self._rows = [self.pool.open() for _ in self.prompts]
        for row in self._rows:
            row.reserve(job.prompt + job.new)
        with torch.no_grad():
            decoder.step([prompt[:-1] for prompt in self.prompts], self._rows)
        self.step = GraphedStep(decoder, self.pool, job.batch, each)
        self._chooser = TokenSampler([Sampling()] * job.batch, decoder.config.vocab, device)
        self.rewind()

    def rewind(self) -> None:
        """The last token of every prompt is the next one to be fed."""
        pairs = zip(self._rows, self.prompts, strict=True)
        self.step.load([StepRow(row, prompt[-1], 0) for row, prompt in pairs])

    def from_the_prompt(self) -> Callable[[], torch.Tensor]:
        """Goes back there; each call of what it gives is a greedy step from then on."""
        self.rewind()
        return lambda: self.step.choose(self._chooser)
