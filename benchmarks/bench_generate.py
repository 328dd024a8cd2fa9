"""Generation against Hugging Face `generate` in the same run, on one GPU or on a CPU.

    PYTHONPATH=src python benchmarks/bench_generate.py --device cuda
    PYTHONPATH=src python benchmarks/bench_generate.py --device cpu --threads 2
    … --sections greedy beams for a part of the GPU's cases; the others stay as they are in the file
    … --quick for a look that takes a minute and says little

GPU: the 254 M shape of the anchors (16 layers, width 1024, 16/8 heads, vocabulary 32 000), batch
8, prompt 128, 128 new tokens, bf16, greedy and 8 beams, peers transformers eager and static cache
+ compile; prompt 8192 with 8 beams and its peak memory; ids in fp32 and the teacher-forced logit
error in bf16; a permuted page table against pages in order; 1.7B and 8B shapes with random weights
against the time to read weights and cache. CPU: a smaller shape, batch 1, greedy and 8 beams.

A *step* is the slope between two lengths: (time of n tokens − time of n/2) / (n/2).
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import (
    RESULTS,
    Contender,
    Rules,
    ceilings,
    compare,
    device_name,
    errors,
    show,
    write,
)

from trapline.gold.beam_search.api import beam_search, checked_rules
from trapline.gold.decoder.beams import BeamModel
from trapline.gold.decoder.beams_device import DeviceSearch
from trapline.gold.decoder.config import DecoderConfig, RopeConfig
from trapline.gold.decoder.engine import Engine
from trapline.gold.decoder.graphs import Running, StaticStep
from trapline.gold.decoder.model import Decoder
from trapline.gold.decoder.pool import Pool

PAGE = 16
OWN_ROUNDS = 9
SECTIONS = ("ids", "logits", "greedy", "beams", "long", "1.7B", "8B")


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
    """The same random weights in transformers and here."""
    torch.manual_seed(0)
    config = shape.theirs(context)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    theirs.requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = Decoder.from_pretrained(folder, device=device).requires_grad_(False)
    return theirs, ours


def peer(model: Any, job: Job, **options: Any) -> Callable[[int], list[list[int]]]:
    """Their `generate`, of any length up to the job's."""
    prompts = torch.tensor(job.prompts(model.config.vocab_size), device=model.device)
    mask = torch.ones_like(prompts)

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


def ours_greedy(decoder: Decoder, job: Job, *, permuted: bool = False) -> Callable[[int], Any]:
    """One engine for all calls: what is captured once is used again, as in a server."""
    pages = job.batch * (-(-(job.prompt + job.new) // PAGE))
    engine = Engine(decoder, rows=job.batch, pages=pages, page_size=PAGE)
    if permuted:
        torch.manual_seed(1)
        engine.pool.book._free = torch.randperm(pages).tolist()
    prompts = job.prompts(decoder.config.vocab)

    def run(new: int) -> list[list[int]]:
        numbers = [engine.add(prompt, max_new_tokens=new) for prompt in prompts]
        answers: dict[int, list[int]] = {number: [] for number in numbers}
        while engine.is_busy:
            for token in engine.step():
                answers[token.request].append(token.token)
        return [answers[number] for number in numbers]

    return run


def ours_beams(decoder: Decoder, job: Job) -> Callable[[int], list[list[int]]]:
    """One pool and one static step for all calls. The policy is the peer's: ids are compared."""
    prompts = job.prompts(decoder.config.vocab)
    end = decoder.config.vocab - 1
    if decoder.device.type == "cuda":
        return on_device(decoder, job, prompts, end)
    model = BeamModel(decoder, prompts, job.beams, job.new, eos_ids=[end])

    def run(new: int) -> list[list[int]]:
        found = beam_search(
            model, prompts, beam_width=job.beams, max_new_tokens=new, eos_id=end, policy="hf"
        )
        return [list(best.tokens) for best, *_ in found]

    return run


def on_device(
    decoder: Decoder, job: Job, prompts: list[list[int]], end: int
) -> Callable[[int], list[list[int]]]:
    """One search for each length, captured at its first call."""
    searches: dict[int, DeviceSearch] = {}

    def run(new: int) -> list[list[int]]:
        if new not in searches:
            rules, _ = checked_rules(job.beams, new, end, policy="hf")
            searches[new] = DeviceSearch(decoder, [job.prompt] * job.batch, rules)
        return [list(best.tokens) for best, *_ in searches[new](prompts, 1)]

    return run


def ours(decoder: Decoder, job: Job) -> Callable[[int], list[list[int]]]:
    return ours_beams(decoder, job) if job.beams > 1 else ours_greedy(decoder, job)


def race(
    runs: dict[str, Callable[[int], Any]], job: Job, device: str, rules: Rules
) -> dict[str, Any]:
    """Whole calls of n and of n/2 tokens in turn; the first is the one others are compared with.

    Our own calls are short: they have rounds of their own first, so that their slope is not noise.
    """
    half = job.new // 2
    contenders = [
        Contender(f"{name}, {new} new", lambda _, run=run, new=new: lambda: run(new))
        for name, run in runs.items()
        for new in (job.new, half)
    ]
    own = [one for one in contenders if one.name.startswith("ours")]
    times = compare(own, device, replace(rules, rounds=OWN_ROUNDS, warm_up=0.5), wall=True)
    if len(own) < len(contenders):
        beside = compare([own[0], *contenders[len(own) :]], device, rules, wall=True)
        times += beside[1:]
    steps = {
        name: (times[2 * i].seconds - times[2 * i + 1].seconds) / (job.new - half)
        for i, name in enumerate(runs)
    }
    first = next(iter(steps.values()))
    print(f"\n{job.name}\n{show(times, 'ms')}")
    for name, seconds in steps.items():
        print(f"  step of {name}: {seconds * 1e3:.3f} ms, {seconds / first:.2f}× ours")
    return {"job": job.name, "times": times, "steps": steps}


def gpu(device: str, quick: bool, sections: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The sections that were asked for, in that order, each with its cases."""
    rules, new = Rules(rounds=2, warm_up=0.0, drift=1.0), 32 if quick else 128
    once = replace(rules, rounds=1)  # for peers that take seconds a call
    models = cache(lambda: pair(ANCHOR, 8192 + 256, device, torch.bfloat16))
    for section in sections:
        if section == "ids":
            yield {"same ids, float32": same_ids(ANCHOR, Job(8, 128, new), device)}
        elif section == "logits":
            yield {"teacher-forced logits, bfloat16": logit_errors(*models(), device)}
        elif section == "greedy":
            job = Job(8, 128, new)
            yield {job.name: race(greedy_runs(*models(), job), job, device, rules)}
        elif section == "beams":
            job = Job(8, 128, new, 8)
            yield {job.name: race(beam_runs(*models(), job), job, device, once)}
        elif section == "long":
            yield long_prompt(*models(), Job(1, 8192, new // 2, 8), device, once)
        else:
            shape = next(one for one in LARGER if one.name == section)
            yield {shape.name: against_reading(shape, Job(8, 128, new), device, rules)}


def beam_runs(theirs: Any, mine: Decoder, job: Job) -> dict[str, Callable[[int], Any]]:
    return {"ours": ours(mine, job), "transformers": peer(theirs, job)}


def greedy_runs(theirs: Any, mine: Decoder, job: Job) -> dict[str, Callable[[int], Any]]:
    return {
        "ours": ours(mine, job),
        "ours, pages permuted": ours_greedy(mine, job, permuted=True),
        "transformers": peer(theirs, job),
        "transformers, static + compile": peer(theirs, job, cache_implementation="static"),
    }


def long_prompt(theirs: Any, mine: Decoder, job: Job, device: str, rules: Rules) -> dict[str, Any]:
    """Times, and the bytes at the highest point of one call; ours makes its pool in the call."""
    runs = beam_runs(theirs, mine, job)
    highest = {name: peak(run, job.new) for name, run in runs.items()}
    print(f"peak bytes above the weights: {highest}")
    return {job.name: {**race(runs, job, device, rules), "peak_bytes": highest}}


def same_ids(shape: Shape, job: Job, device: str) -> dict[str, Any]:
    """The share of equal tokens in fp32 (TF32 off), greedy and with beams."""
    torch.backends.cuda.matmul.allow_tf32 = False
    shares = {}
    theirs, mine = pair(shape, job.prompt + job.new, device, torch.float32)
    for one in (job, Job(job.batch, job.prompt, job.new, 8)):
        expected, found = peer(theirs, one)(one.new), ours(mine, one)(one.new)
        pairs = [
            a == b
            for row, other in zip(expected, found, strict=True)
            for a, b in zip(row, other, strict=False)
        ]
        shares[one.name] = sum(pairs) / len(pairs)
    print(f"same ids in fp32: {shares}")
    return {"share of equal tokens": shares}


def logit_errors(theirs: Any, mine: Decoder, device: str) -> dict[str, Any]:
    """Teacher-forced, against their weights in float64; the last token also by a static step."""
    prompts = Job(2, 128, 1).prompts(mine.config.vocab)
    ids = torch.tensor(prompts, device=device)
    with torch.no_grad():
        given = {"ours": mine(ids), "transformers": theirs(ids).logits}
        wide = type(theirs)(theirs.config).to(device, torch.float64)
        wide.load_state_dict(theirs.state_dict())
        exact = wide(ids).logits
        stepped = last_logits(mine, prompts)
    found = {name: errors(logits, exact) for name, logits in given.items()}
    found["ours, by a static step"] = errors(stepped, exact[:, -1])
    found["transformers, the same tokens"] = errors(given["transformers"][:, -1], exact[:, -1])
    print(f"logits against float64: {found}")
    return {"errors": found}


def last_logits(decoder: Decoder, prompts: list[list[int]]) -> torch.Tensor:
    """After the last token of each, which the static step feeds."""
    pages = -(-len(prompts[0]) // PAGE)
    dtype = decoder.norm.weight.dtype
    pool = Pool(decoder.config, pages * len(prompts), PAGE, dtype, decoder.device)
    rows = [pool.open() for _ in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        row.reserve(len(prompt))
    decoder.step([prompt[:-1] for prompt in prompts], rows)
    step = StaticStep(decoder, pool, len(prompts), pages)
    step.load([Running(row, prompt[-1], 0) for row, prompt in zip(rows, prompts, strict=True)])
    return step.logits()[: len(prompts)]


def peak(run: Callable[[int], Any], new: int) -> int:
    """Bytes at the highest point of one call, above what is there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(new)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def against_reading(shape: Shape, job: Job, device: str, rules: Rules) -> dict[str, Any]:
    """A step against the time to read the weights and the cache once."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        decoder = Decoder(shape.ours(job.prompt + job.new)).requires_grad_(False).eval()
        torch.set_default_dtype(torch.float32)
    read = compare(ceilings(1 << 30, device)[1:2], device, Rules(rounds=rules.rounds))[0]
    result = race({"ours": ours_greedy(decoder, job)}, job, device, rules)
    weights = sum(one.nbytes for one in decoder.parameters())
    weights -= 0 if shape.tied else decoder.embedding.weight.nbytes  # eight rows of it are read
    cached = shape.cache_bytes(job.batch * (job.prompt + job.new * 3 // 4), 2)
    seconds = (weights + cached) / (read.gb_per_s * 1e9)
    ratio = result["steps"]["ours"] / seconds
    print(f"  {shape.name}: {ratio:.2f}× of the {seconds * 1e3:.3f} ms to read weights and cache")
    return {**result, "read": read, "reading_seconds": seconds, "ratio": ratio}


def cpu(quick: bool) -> dict[str, Any]:
    """Batch 1, greedy and with 8 beams; the same ids."""
    shape = TINY if quick else FOR_CPU
    rules = Rules(rounds=2 if quick else 5, warm_up=0.0, drift=1.0)
    jobs = [Job(1, 128, 8 if quick else 64, beams) for beams in (1, 8)]
    results: dict[str, Any] = {"same ids, float32": same_ids(shape, jobs[0], "cpu")}
    theirs, mine = pair(shape, 512, "cpu", torch.float32)
    for job in jobs:
        runs = {"ours": ours(mine, job), "transformers": peer(theirs, job)}
        results[job.name] = race(runs, job, "cpu", rules)
        whole = results[job.name]["times"]
        print(f"  transformers / ours, whole call: {whole[2].seconds / whole[0].seconds:.2f}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Generation against transformers.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU section")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--sections", nargs="+", default=SECTIONS, choices=SECTIONS, help="of the GPU; default all"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.device == "cpu":
        torch.set_num_threads(options.threads)
        write("generate", "cpu", cpu(options.quick), folder=options.out)
        return
    results = {} if set(options.sections) == set(SECTIONS) else earlier("cuda", options.out)
    for cases in gpu(options.device, options.quick, options.sections):
        results |= cases
        print(f"written: {write('generate', options.device, results, folder=options.out)}")


def earlier(device: str, folder: Path) -> dict[str, Any]:
    """What other sections wrote on this machine: a run may be cut into several."""
    path = folder / device_name(device).replace(" ", "-").lower() / "generate.json"
    found: dict[str, Any] = json.loads(path.read_text())["results"] if path.is_file() else {}
    return found


if __name__ == "__main__":
    main()
