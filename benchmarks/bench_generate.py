"""Generation against Hugging Face `generate` in the same run, on one GPU or on a CPU.

    PYTHONPATH=src python benchmarks/bench_generate.py --device cuda
    PYTHONPATH=src python benchmarks/bench_generate.py --device cpu --threads 2
    … --sections greedy beams for a part of the GPU's cases; the others stay as they are in the file
    … --quick for a look that takes a minute and says little

GPU: the 254 M shape of the anchors (16 layers, width 1024, 16/8 heads, vocabulary 32 000), batch
8, prompt 128, 128 new tokens, bf16. In the order of their importance, each written when it is done:

greedy   whole calls against transformers, eager
beams    the same with 8 beams
pages    the captured step on a page table in order and on a permuted one
1.7B, 8B larger shapes with random weights against the time to read weights and cache, calls and the
         captured step
long     prompt 8192 with 8 beams: time, and the highest point of memory
ids      the same ids in float32 (TF32 off), greedy and with beams
logits   teacher-forced logits in bf16 against float64
static   whole calls against transformers with a static cache and compile; compiling takes longest

CPU: a smaller shape, batch 1, greedy and 8 beams.

A *step* is the slope between two lengths: (time of n tokens − time of n/2) / (n/2), the median over
rounds. Both calls of a round are neighbours in time: hosts are slower for a second or two now and
then, which hits both, and a slope between medians would mix calls of different seconds. A *captured
step* is the time of replays of its CUDA graph, so the host is not in it.
"""

import argparse
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from generate_cases import (
    ANCHOR,
    FOR_CPU,
    LARGER,
    PAGE,
    TINY,
    Job,
    Loaded,
    Run,
    Shape,
    ours,
    pair,
    peer,
    random_decoder,
)
from harness import (
    RESULTS,
    Contender,
    Rules,
    Timing,
    WallClock,
    ceilings,
    compare,
    device_name,
    errors,
    show,
    timing,
    write,
)

from trapline.gold.decoder.api import Decoder

#: Our calls on a GPU are short, and a host's hiccup of 10 ms is 4 % of an 8B step's slope.
OWN_ROUNDS, PEER_ROUNDS, CPU_ROUNDS, CAPTURED_ROUNDS = 31, 5, 15, 15
ON_A_CPU = ("beams", "greedy", "ids")
SECTIONS = ("greedy", "beams", "pages", "1.7B", "8B", "long", "ids", "logits", "static")


def race(runs: dict[str, Run], job: Job, device: str) -> dict[str, Any]:
    """Whole calls of n and of n/2 tokens; the first runner is the one others are compared with.

    On a CPU all take turns. On a GPU our own calls are short, and have rounds of their own, so that
    their slope is not noise. Peers take seconds a call: one of full length goes before (a shorter
    one leaves them with seconds of work for later), and they are timed five times.
    """
    half = job.new // 2
    (first, mine), *peers = runs.items()
    rounds = CPU_ROUNDS if device == "cpu" else OWN_ROUNDS
    rules = Rules(rounds=rounds, warm_up=0.5, drift=1.0)
    own = lengths(first, mine, job)
    if device == "cpu":
        others = [one for name, run in peers for one in lengths(name, run, job)]
        times, peers = compare([*own, *others], device, rules, wall=True), []
    else:
        times = compare(own, device, rules, wall=True)
    for name, run in peers:
        run(job.new)
        timers = [(one, WallClock(device).prepare(one, rules)) for one in lengths(name, run, job)]
        taken = [[timer() for _, timer in timers] for _ in range(PEER_ROUNDS)]
        columns = zip(*taken, strict=True)
        times += [timing(one, list(row)) for (one, _), row in zip(timers, columns, strict=True)]
    slopes = {
        name: [
            (more - less) / (job.new - half)
            for more, less in zip(times[2 * i].raw, times[2 * i + 1].raw, strict=True)
        ]
        for i, name in enumerate(runs)
    }
    steps = {name: median(found) for name, found in slopes.items()}
    print(f"\n{job.name}\n{show(times, 'ms')}")
    for i, (name, seconds) in enumerate(steps.items()):
        print(
            f"  step of {name}: {seconds * 1e3:.3f} ms, {seconds / steps[first]:.2f}× ours;"
            f" whole call {times[2 * i].seconds / times[0].seconds:.2f}×",
            flush=True,
        )
    return {"job": job.name, "times": times, "slopes": slopes, "steps": steps}


def lengths(name: str, run: Run, job: Job) -> list[Contender]:
    """A runner twice: all of its tokens, and half of them."""
    return [
        Contender(f"{name}, {new} new", lambda _, new=new: lambda: run(new))
        for new in (job.new, job.new // 2)
    ]


def gpu(device: str, quick: bool, sections: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The sections that were asked for, in that order, each with its cases."""
    new = 32 if quick else 128
    models = cache(lambda: pair(ANCHOR, 8192 + 256, device, torch.bfloat16))
    for section in sections:
        if section in ("greedy", "beams"):
            job = Job(8, 128, new, 8 if section == "beams" else 1)
            runs = {"ours": ours(models()[1], job), "transformers": peer(models()[0], job)}
            yield {job.name: race(runs, job, device)}
        elif section == "pages":
            yield {"page tables, captured step": page_tables(models()[1], captured(new), device)}
        elif section == "long":
            yield long_prompt(*models(), Job(1, 8192, new // 2, 8), device)
        elif section == "ids":
            yield {"same ids, float32": same_ids(ANCHOR, Job(8, 128, new), device)}
        elif section == "logits":
            yield {"teacher-forced logits, bfloat16": logit_errors(*models(), device)}
        elif section == "static":
            yield static_cache(*models(), Job(8, 128, new), device)
        else:
            shape = next(one for one in LARGER if one.name == section)
            yield {shape.name: against_reading(shape, Job(8, 128, new), device)}


def captured(new: int) -> Job:
    """Steps to replay whose mean position is that of the other calls."""
    return Job(8, 160, new // 2)


def static_cache(theirs: Any, mine: Decoder, job: Job, device: str) -> dict[str, Any]:
    """Their fastest way. The longer call comes first: the cache is as long as the longest asked."""
    runs = {
        "ours": ours(mine, job),
        "transformers": peer(theirs, job, cache_implementation="static"),
    }
    return {f"{job.name}, static cache + compile": race(runs, job, device)}


def long_prompt(theirs: Any, mine: Decoder, job: Job, device: str) -> dict[str, Any]:
    """Times, and the bytes at the highest point of one call; ours makes its pool in the call."""
    runs = {"ours": ours(mine, job), "transformers": peer(theirs, job)}
    highest = {name: peak(run, job.new) for name, run in runs.items()}
    print(f"peak bytes above the weights: {highest}")
    return {job.name: {**race(runs, job, device), "peak_bytes": highest}}


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
        print(f"same ids in fp32: {one.name}: {shares[one.name]}", flush=True)
    return {"share of equal tokens": shares}


def logit_errors(theirs: Any, mine: Decoder, device: str) -> dict[str, Any]:
    """Teacher-forced, against their weights in float64; the last token also by a static step."""
    job = Job(2, 128, 1)
    ids = torch.tensor(job.prompts(mine.config.vocab), device=device)
    with torch.no_grad():
        given = {"ours": mine(ids), "transformers": theirs(ids).logits}
        exact = copy.deepcopy(theirs).double()(ids).logits
        stepped = Loaded(mine, job).step.logits()[: job.batch]
    found = {name: errors(logits, exact) for name, logits in given.items()}
    found["ours, by a static step"] = errors(stepped, exact[:, -1])
    found["transformers, the same tokens"] = errors(given["transformers"][:, -1], exact[:, -1])
    print(f"logits against float64: {found}")
    return {"errors": found}


def peak(run: Run, new: int) -> int:
    """Bytes at the highest point of one call, above what is there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(new)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def page_tables(decoder: Decoder, job: Job, device: str) -> dict[str, Any]:
    """The same step with pages one after the other and with pages anywhere in the pool."""
    count = job.batch * (-(-(job.prompt + job.new) // PAGE))
    anywhere = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    orders = {"pages in order": list(range(count))[::-1], "pages permuted": anywhere}
    times = captured_steps(decoder, job, device, orders)
    cost = times[1].seconds / times[0].seconds - 1
    print(f"{show(times)}\n  a permuted table costs {cost:+.2%} of a step", flush=True)
    return {"job": job.name, "times": times, "cost": cost}


def captured_steps(
    decoder: Decoder, job: Job, device: str, orders: dict[str, list[int] | None]
) -> list[Timing]:
    """Replays of one step's graph, by the order of the pool's pages."""
    contenders = [
        Contender(name, lambda _, order=order: Loaded(decoder, job, order).from_the_prompt)
        for name, order in orders.items()
    ]
    rules = Rules(rounds=CAPTURED_ROUNDS, warm_up=0.2)
    return compare(contenders, device, rules, clock=StepClock(job.new, device))


class StepClock:
    """The mean of steps in a row, always from the same position, the device idle before them."""

    def __init__(self, steps: int, device: str) -> None:
        self.steps, self.clock = steps, WallClock(device)

    def prepare(self, contender: Contender, rules: Rules) -> Callable[[], float]:
        rewind = contender.make(0)

        def once() -> float:
            step = rewind()
            steps = Contender("", lambda _: lambda: [step() for _ in range(self.steps)])
            return self.clock.prepare(steps, rules)() / self.steps

        return once


def against_reading(shape: Shape, job: Job, device: str) -> dict[str, Any]:
    """A step against the time to read the weights and the cache once."""
    decoder = random_decoder(shape, job.prompt + job.new, device)
    read = compare(ceilings(1 << 30, device)[1:2], device, Rules(rounds=3))[0]
    result = race({"ours": ours(decoder, job)}, job, device)
    replayed = captured_steps(decoder, captured(job.new), device, {"captured step": None})[0]
    weights = sum(one.nbytes for one in decoder.parameters())
    weights -= 0 if shape.tied else decoder.embedding.weight.nbytes  # eight rows of it are read
    cached = shape.cache_bytes(job.batch * (job.prompt + job.new * 3 // 4), 2)
    seconds = (weights + cached) / (read.gb_per_s * 1e9)
    ratio, bare = result["steps"]["ours"] / seconds, replayed.seconds / seconds
    print(
        f"  {shape.name}: {ratio:.2f}× of the {seconds * 1e3:.3f} ms to read weights and cache;"
        f" the captured step {replayed.seconds * 1e3:.3f} ms, {bare:.2f}×",
        flush=True,
    )
    figures = {"ratio": ratio, "captured": replayed, "captured_ratio": bare}
    return {**result, "read": read, "reading_seconds": seconds, **figures}


def cpu(quick: bool) -> Iterator[dict[str, Any]]:
    """Batch 1, greedy and with 8 beams; the same ids."""
    shape = TINY if quick else FOR_CPU
    jobs = [Job(1, 128, 8 if quick else 64, beams) for beams in (8, 1)]
    theirs, mine = pair(shape, 512, "cpu", torch.float32)
    for job in jobs:
        runs = {"ours": ours(mine, job), "transformers": peer(theirs, job)}
        yield {job.name: race(runs, job, "cpu")}
    yield {"same ids, float32": same_ids(shape, jobs[1], "cpu")}


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
        found, results, done = cpu(options.quick), {}, []
        options.sections = ON_A_CPU
    else:
        whole = set(options.sections) == set(SECTIONS)
        results, done = ({}, []) if whole else earlier(options.device, options.out)
        found = gpu(options.device, options.quick, options.sections)
    for number, cases in enumerate(found):
        results |= cases
        sections = list(dict.fromkeys((*done, *options.sections[: number + 1])))
        write("generate", options.device, results, folder=options.out, sections=sections)


def earlier(device: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What other sections wrote on this machine, and which: a run may be cut into several."""
    path = folder / device_name(device).replace(" ", "-").lower() / "generate.json"
    if not path.is_file():
        return {}, []
    record = json.loads(path.read_text())
    return record["results"], record["sections"]


if __name__ == "__main__":
    main()
