"""Bugs of make_cache and max_context."""

from functools import partial
from typing import Any

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import (
    Rng,
    context,
)
from trapline.challenges.kv_cache.situations import BAD, BLIND


def _make(submission: Submission, kind: str = "paged", **changed: Any) -> Any:
    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 4, "block_size": 4, "num_blocks": 4}
    return submission.make_cache(kind, **{**sizes, **changed})


@trap(
    catches="a kind that does not exist falls back to another",
    severity="minor",
    story="A typo in a configuration file then selects an unquantised cache.",
    dimension="robustness",
    mutant=edit("if kind not in KINDS:", "if False:"),
)
def unknown_kind(submission: Submission, _rng: Rng) -> None:
    for kind in ("paged-quantized", "DENSE", "", "quantised"):
        expect.raises(BAD, _make, submission, kind, bits=8)


@trap(
    catches="a quantised cache accepts a number of bits it cannot store",
    severity="minor",
    story="Two bits stored in a format for four leave most of the codes unused.",
    dimension="robustness",
    mutant=edit("if quantised and (not is_int(bits) or bits not in (4, 8)):", "if False:"),
)
def bits_not_checked(submission: Submission, _rng: Rng) -> None:
    for kind in ("quantized", "paged_quantized"):
        for bits in (None, 0, 2, 3, 16):
            expect.raises(BAD, _make, submission, kind, bits=bits)


@trap(
    catches="a size of zero or less is accepted",
    severity="minor",
    story="A pool without pages then fails at the first request instead of at the start.",
    dimension="robustness",
    mutant=edit(
        "    if not all(is_int(size) and size >= 1 for size in shape):\n"
        '        raise ValueError(f"sizes must be ints ≥ 1: {shape}")\n',
        "",
    ),
)
def sizes_not_checked(submission: Submission, _rng: Rng) -> None:
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "num_blocks"):
        for size in (0, -1, 2.5):
            changed: dict[str, Any] = {name: size}
            expect.raises(BAD, _make, submission, **changed)


SPEC = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "bits": 16}


@trap(
    catches="the values are not counted, so the context is twice too long",
    severity="major",
    story="The factor two for K and V is lost between bits and bytes.",
    mutant=edit("2 * math.prod(sizes) / 8", "math.prod(sizes) / 8"),
)
def context_of_keys_only(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 1.0, 0, 0)


@trap(
    catches="a missing entry of the specification is guessed, or raises another error",
    severity="minor",
    story="Without a number of kv heads, one path guesses and another raises a bare KeyError.",
    dimension="robustness",
    mutant=edit(
        "    missing = [name for name in SPEC if name not in spec]\n",
        '    spec = {"bits": 16, "num_kv_heads": 8, **spec}\n    missing = []\n',
    ),
)
def specification_not_whole(submission: Submission, _rng: Rng) -> None:
    room = {"utilization": 1.0, "weight_bytes": 0, "reserve_bytes": 0}
    for name in SPEC:
        rest = {key: value for key, value in SPEC.items() if key != name}
        expect.raises(BAD, submission.max_context, rest, 2**36, **room)


@trap(
    catches="bits are used as bytes",
    severity="major",
    story="The context comes out eight times too short.",
    mutant=edit("2 * math.prod(sizes) / 8", "2 * math.prod(sizes)"),
)
def bits_taken_for_bytes(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 2**34, 2**30)


@trap(
    catches="4 bits are rounded to a whole number of bytes",
    severity="major",
    story="bits // 8 is 0 for four bits.",
    mutant=edit("2 * math.prod(sizes) / 8", "2 * math.prod(sizes[:3]) * max(1, sizes[3] // 8)"),
    seen=BLIND,
)
def four_bit_context(submission: Submission, _rng: Rng) -> None:
    context(submission, {**SPEC, "bits": 4}, 2**35, 1.0, 2**33, 0)
    odd = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 3, "bits": 4}
    context(submission, odd, 3001, 1.0, 1, 0)
    context(submission, {**odd, "bits": 12}, 3001, 1.0, 0, 0)


@trap(
    catches="weights that do not fit give a negative context, or that without its sign",
    severity="major",
    story="A negative context compared in unsigned arithmetic looks very large.",
    mutant=edit(
        "max(0, math.floor(budget / bytes_per_token))", "math.floor(budget / bytes_per_token)"
    ),
    also=[
        edit(
            "max(0, math.floor(budget / bytes_per_token))",
            "abs(math.floor(budget / bytes_per_token))",
        )
    ],
    seen=BLIND,
)
def negative_context(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**34, 0.5, 2**34, 0)
    context(submission, SPEC, 2**34, 0.5, 2**33, 1)
    context(submission, SPEC, 2**34, 0.5, 2**33, 0)


@trap(
    catches="the number of tokens is rounded to the nearest",
    severity="major",
    story="Rounding up promises one token more than fits.",
    mutant=edit("math.floor(budget / bytes_per_token)", "round(budget / bytes_per_token)"),
    seen=BLIND,
)
def context_rounded_up(submission: Submission, _rng: Rng) -> None:
    a_token = 2 * 32 * 8 * 128 * 2
    for short in (1, a_token // 4, a_token - 1):
        context(submission, SPEC, 1000 * a_token - short, 1.0, 0, 0)
    context(submission, SPEC, 1000 * a_token, 1.0, 0, 0)


@trap(
    catches="the utilisation is applied to what the weights leave, not to the whole memory",
    severity="major",
    story="The share of memory that a server may use includes its weights.",
    seen=BLIND,
    mutant=edit(
        "utilization * gpu_bytes - weight_bytes - reserve_bytes",
        "utilization * (gpu_bytes - weight_bytes - reserve_bytes)",
    ),
)
def utilization_of_the_rest(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 2**34, 0)


@trap(
    catches="the reserve for activations is not subtracted: it is ignored, added, or hidden by the "
    "weights where they are larger",
    severity="major",
    story="A long prompt then has no memory left for its activations.",
    mutant=edit("- weight_bytes - reserve_bytes", "- weight_bytes"),
    also=[
        edit("- weight_bytes - reserve_bytes", "- weight_bytes + reserve_bytes"),
        edit("- weight_bytes - reserve_bytes", "- max(weight_bytes, reserve_bytes)"),
    ],
)
def reserve_ignored(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 1.0, 0, 2**33)
    context(submission, SPEC, 2**36, 0.75, 5 * 2**30, 3 * 2**30)


@trap(
    catches="a model of 0 or −1 layers gets an answer or a division by zero",
    severity="minor",
    story="A field missing from a configuration file is read as 0.",
    dimension="robustness",
    mutant=edit("if not all(is_int(size) and size >= 1 for size in sizes):", "if False:"),
)
def specification_not_checked(submission: Submission, _rng: Rng) -> None:
    for name in SPEC:
        for size in (0, -1):
            call = partial(submission.max_context, {**SPEC, name: size}, 2**36)
            expect.raises(BAD, call, utilization=1.0, weight_bytes=0, reserve_bytes=0)


@trap(
    catches="negative bytes are accepted, and add to the budget",
    severity="minor",
    story="A difference with the wrong sign allows more context than the GPU can hold.",
    dimension="robustness",
    mutant=edit("if min(gpu_bytes, weight_bytes, reserve_bytes) < 0:", "if False:"),
)
def negative_bytes(submission: Submission, _rng: Rng) -> None:
    for gpu, weights, reserve in ((-1, 0, 0), (2**30, -1, 0), (2**30, 0, -1)):
        call = partial(submission.max_context, SPEC, gpu, utilization=1.0)
        expect.raises(BAD, call, weight_bytes=weights, reserve_bytes=reserve)


@trap(
    catches="a utilisation outside (0, 1] is accepted",
    severity="minor",
    story="90 instead of 0.9 gives a context of many millions of tokens.",
    dimension="robustness",
    mutant=edit("if not 0 < utilization <= 1:", "if False:"),
)
def utilization_in_percent(submission: Submission, _rng: Rng) -> None:
    for use in (90.0, 1.5, 0.0, -0.5):
        expect.raises(
            BAD,
            submission.max_context,
            SPEC,
            2**36,
            utilization=use,
            weight_bytes=0,
            reserve_bytes=0,
        )


@trap(
    catches="bytes per token are computed by integer division",
    severity="minor",
    story="At odd widths with 3 bits the discarded remainder becomes context that does not fit.",
    mutant=edit("2 * math.prod(sizes) / 8", "max(1, 2 * math.prod(sizes) // 8)"),
    seen=BLIND,
)
def fraction_of_a_byte(submission: Submission, _rng: Rng) -> None:
    for layers, width, bits in ((3, 5, 3), (1, 1, 1), (1, 7, 3)):
        spec = {"num_layers": layers, "num_kv_heads": 1, "head_dim": width, "bits": bits}
        call = partial(submission.max_context, spec, 10_000, utilization=1.0)
        tokens, terms = call(weight_bytes=100, reserve_bytes=0)
        bits_a_token = 2 * layers * width * bits
        expect.equal(tokens, 9900 * 8 // bits_a_token, "tokens")
        expect.equal(terms["bytes_per_token"], bits_a_token / 8, "bytes_per_token")
