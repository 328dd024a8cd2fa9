"""Bugs of the sum that says how much context fits."""

from trapline.arena.judge.traps import Mutant, edit, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import Rng, context
from trapline.challenges.kv_cache.situations import BLIND
from trapline.challenges.kv_cache.traps_sizes import SPEC

BUDGET = "budget = utilization * gpu_bytes - weight_bytes - reserve_bytes"
TERMS = '{"bytes_per_token": bytes_per_token, "budget_bytes": budget}'
TOKENS = "tokens = max(0, math.floor(budget / bytes_per_token))"
PER_POSITION = "2 * math.prod(sizes) / 8"


@trap(
    catches="the budget is reported as 0 where it is negative",
    severity="minor",
    story="The caller cannot see by how much the weights do not fit.",
    mutant=edit(BUDGET, BUDGET.replace("= ", "= max(0.0, ") + ")"),
    seen=BLIND,
)
def budget_never_negative(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**34, 0.5, 3 * 2**32, 0)


def _terms(bytes_per_token: str, budget: str) -> Mutant:
    """The terms that are reported, beside tokens that are right."""
    return edit(TERMS, f'{{"bytes_per_token": {bytes_per_token}, "budget_bytes": {budget}}}')


def _whole_budget(submission: Submission, _rng: Rng) -> None:
    context(submission, {**SPEC, "num_layers": 1}, 2**36, 1.0, 0, 0)


@trap(
    catches="the term budget_bytes is not the numerator of the sum: nothing is subtracted in it, "
    "or it is what the tokens take",
    severity="major",
    story="The number of tokens is right, and its explanation is that of another sum.",
    mutant=_terms("bytes_per_token", "utilization * gpu_bytes"),
    also=[
        _terms("bytes_per_token", budget)
        for budget in (
            "tokens * bytes_per_token",
            "gpu_bytes",
            "gpu_bytes - weight_bytes - reserve_bytes",
            "utilization * gpu_bytes - weight_bytes",
        )
    ],
    control=_whole_budget,
)
def budget_of_another_sum(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.75, 5 * 2**30, 3 * 2**30 + 2**16)


@trap(
    catches="the term bytes_per_token is not that of the sum: one layer's, that of keys alone, or "
    "cut to whole bytes",
    severity="major",
    story="The number of tokens is right, and its explanation is that of another sum.",
    mutant=_terms('bytes_per_token / spec["num_layers"]', "budget"),
    also=[
        _terms(a_token, "budget")
        for a_token in (
            "bytes_per_token / 2",
            "8 * bytes_per_token",
            "int(bytes_per_token)",
            "math.ceil(bytes_per_token)",
        )
    ],
)
def token_of_another_sum(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.75, 5 * 2**30, 3 * 2**30)
    context(
        submission,
        {**SPEC, "num_layers": 1, "num_kv_heads": 1, "head_dim": 3, "bits": 3},
        10_000,
        1.0,
        0,
        0,
    )


@trap(
    catches="the number of tokens is a float",
    severity="minor",
    story="A floor division of floats gives a float.",
    mutant=edit(TOKENS, "tokens = max(0.0, budget // bytes_per_token)"),
)
def tokens_are_a_float(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 2**34, 2**30)


@trap(
    catches="the utilisation is ignored",
    severity="major",
    story="The whole memory is divided among the tokens.",
    mutant=edit(BUDGET, "budget = gpu_bytes - weight_bytes - reserve_bytes"),
)
def utilization_ignored(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 2**34, 0)


@trap(
    catches="the weights are not subtracted",
    severity="major",
    story="The context is what would fit beside no model.",
    mutant=edit(BUDGET, "budget = utilization * gpu_bytes - reserve_bytes"),
)
def weights_ignored(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 1.0, 2**34, 0)


@trap(
    catches="the utilisation is applied to what the reserve leaves",
    severity="major",
    story="The reserve is taken from the memory before its share is computed.",
    mutant=edit(BUDGET, "budget = utilization * (gpu_bytes - reserve_bytes) - weight_bytes"),
)
def utilization_after_the_reserve(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 5 * 2**30, 3 * 2**30)


@trap(
    catches="the utilisation is applied to what the weights leave, before the reserve",
    severity="major",
    story="The share of memory that a server may use includes its weights.",
    mutant=edit(BUDGET, "budget = utilization * (gpu_bytes - weight_bytes) - reserve_bytes"),
)
def utilization_after_the_weights(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 0.5, 5 * 2**30, 3 * 2**30)


@trap(
    catches="the bytes of a token are those of one layer",
    severity="major",
    story="The number of layers is left out of the product.",
    mutant=edit(PER_POSITION, "2 * math.prod(sizes[1:]) / 8"),
)
def token_of_one_layer(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 1.0, 0, 0)


@trap(
    catches="the number of kv heads is left out of the bytes of a token",
    severity="major",
    story="The head width is taken for the width of all heads.",
    mutant=edit(PER_POSITION, "2 * math.prod([sizes[0], *sizes[2:]]) / 8"),
)
def token_of_one_head(submission: Submission, _rng: Rng) -> None:
    context(submission, SPEC, 2**36, 1.0, 0, 0)


@trap(
    catches="an element always takes two bytes, whatever bits says",
    severity="major",
    story="The cache of a quantised model gets the size of a float16 one.",
    mutant=edit(PER_POSITION, "2 * math.prod(sizes[:3]) * 2.0"),
)
def bits_ignored(submission: Submission, _rng: Rng) -> None:
    context(submission, {**SPEC, "bits": 8}, 2**36, 1.0, 0, 0)


@trap(
    catches="the number of tokens is rounded up",
    severity="major",
    story="A ceiling where a floor is meant promises a token that does not fit.",
    mutant=edit("math.floor(budget / bytes_per_token)", "math.ceil(budget / bytes_per_token)"),
)
def context_rounded_always_up(submission: Submission, _rng: Rng) -> None:
    a_token = 2 * 32 * 8 * 128 * 2
    context(submission, SPEC, 1000 * a_token + a_token // 4, 1.0, 0, 0)
