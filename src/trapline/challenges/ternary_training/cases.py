"""The contract, part by part. Whatever needs training comes last."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Call, Precision, case, robustness
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.situations import (
    GROUP,
    MOMENT,
    RULE_SECONDS,
    SHORT_RULE_SECONDS,
    config_of,
    grid,
    quantised,
    refuses,
    share_of_counting,
    ternary_codes,
    trained,
    well_formed,
)
from trapline.gold.ternary import oracle, small_lm

#: Of the squared weights of a normal matrix; plain choices reach 0.26, good ones 0.19.
ERROR_LIMIT = 0.3
UNIGRAM_SHARE = 0.85
#: Of the perplexity of word counts, where a rule decides; right answers reach 0.18 and 0.32, and
#: counting pairs of words reaches 1.0 and 0.58.
TWO_BACK_SHARE, RECALL_SHARE = 0.3, 0.45


#: Cases and traps that train for seconds.
SLOW = frozenset(
    {
        "learns-a-rule-two-back",
        "recalls-the-first-token",
        "learns",
        "seconds-ignored",
        "clock-read-once-a-pass",
        "only-the-first-window",
        "future-visible",
        "heads-interleaved",
        "norm-by-sum",
        "layers-without-norm",
        "attention-not-added",
        "mlp-not-added",
        "projections-transposed",
        "head-tied-in-training",
        "predicts-the-present",
        "targets-reversed",
        "targets-shifted-twice",
        "slopes-of-another-rule",
        "distance-added",
        "mlp-of-the-first-layer",
        "another-activation",
        "head-without-norm",
        "context-of-one-layer",
        "tensor-never-trained",
        "nothing-learned",
        "trains-until-collapse",
        "leaky-early-stopping",
    }
)
#: Of these, what the quick reward asks nevertheless: half of the bugs that pass everything else
#: fail it, and a right answer takes half a second.
QUICK_TOO = frozenset({"learns-a-rule-two-back"})


def judged(entry: str, answer: Any) -> Any:
    """What two answers are compared by: of weights and of sides the form, for they are free."""
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], tuple):
        value, left = answer  # with the arguments as left
        return [judged(entry, value), left]
    if entry == "train" and isinstance(answer, dict):
        return {str(name): _form(pair) for name, pair in answer.items()}
    return None if entry == "split" else answer


def _form(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_form(part) for part in value]
    return [str(value.dtype), value.shape] if isinstance(value, np.ndarray) else str(type(value))


@case
def quantises_normal_weights(submission: Submission, rng: np.random.Generator) -> None:
    for dtype in (np.float32, np.float64):
        w = (0.02 * rng.standard_normal((32, 512))).astype(dtype)
        codes, scales = quantised(submission, w)
        values = oracle.dequantize(codes, scales)
        error = oracle.squared_error(w, values)
        expect.that(
            error <= ERROR_LIMIT, f"the squared error is {error:.3f} of the squared weights"
        )
        expect.that(
            bool(np.all(codes * np.sign(w).astype(np.int8) >= 0)),
            "a code has not its weight's sign",
        )


@case
def shapes_and_ranks(submission: Submission, rng: np.random.Generator) -> None:
    for shape in ((300,), (3, 300), (2, 3, 130), (4, 128), (5, 1), (0, 7), (3, 0)):
        codes, scales = quantised(submission, grid(rng, *shape))
        back = submission.dequantize(codes, scales, GROUP)
        expect.equal(back, oracle.dequantize(codes, scales), f"dequantize of shape {shape}")
        packed = submission.pack(codes)
        expect.equal(packed, oracle.pack(codes), f"pack of shape {shape}")
        expect.equal(submission.unpack(packed, shape), codes, f"unpack to shape {shape}")


@case
def default_group_size(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 300)
    codes, scales = well_formed(submission.ternarize(w), w.shape, GROUP, "ternarize")
    expect.equal(submission.dequantize(codes, scales), oracle.dequantize(codes, scales))


@case
def ternary_stays_ternary(submission: Submission, rng: np.random.Generator) -> None:
    for group_size in (16, 128):
        codes, scales = quantised(submission, grid(rng, 6, 300), group_size)
        values = oracle.dequantize(codes, scales, group_size)
        again = quantised(submission, values, group_size)
        expect.equal(again[0], codes, "the codes of what was dequantised")
        expect.equal(again[1], scales, "the scales of what was dequantised")
    lone = np.zeros((3, 40), dtype=np.float32)
    lone[np.arange(3), rng.integers(0, 40, 3)] = (0.5, -3.0, 0.125)
    codes, scales = quantised(submission, lone, 40)
    expect.equal(oracle.dequantize(codes, scales, 40), lone, "a group with a single weight")


@case
def packs_and_unpacks(submission: Submission, rng: np.random.Generator) -> None:
    for columns in (1, 4, 6, 19):
        codes = ternary_codes(rng, 5, columns)
        packed = submission.pack(codes)
        expect.equal(packed, oracle.pack(codes), f"pack of {columns} columns")
        expect.equal(submission.unpack(packed, codes.shape), codes, f"unpack of {columns} columns")


@case
def splits_documents(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 1000, 300, 12)
    for fraction in (0.0, 0.3, 1.0):
        train, valid = _sides(submission, documents, fraction)
        together = sorted([*train, *valid])
        expect.equal(together, list(range(len(documents))), "the two sides together")
        expect.that(train == sorted(train) and valid == sorted(valid), "indices do not ascend")
        # 300 fair draws: the count leaves ± 45 less than once in 10⁷ runs.
        expect.that(abs(len(valid) - 300 * fraction) <= 45, f"{len(valid)} of 300 held out")
    expect.equal(len(_sides(submission, documents, 0.0)[1]), 0, "held out at fraction 0")
    expect.equal(len(_sides(submission, documents, 1.0)[0]), 0, "left over at fraction 1")
    expect.equal(_sides(submission, [], 0.5), ([], []), "the split of nothing")


@robustness
def refuses_bad_arrays(submission: Submission, rng: np.random.Generator) -> None:
    w = grid(rng, 2, 8)
    for bad in (w.astype(np.complex64), w.astype(np.int64), np.float32(1.0)):
        refuses(submission, "ternarize", np.asarray(bad), 4)
    codes, scales = oracle.ternarize(w, 4)
    refuses(submission, "dequantize", codes, scales[:, :1], 4)
    refuses(submission, "dequantize", codes, scales[:1], 4)
    refuses(submission, "dequantize", codes.astype(np.int64), scales, 4)
    refuses(submission, "dequantize", codes * np.int8(2), scales, 4)
    refuses(submission, "pack", codes.astype(np.float32))
    refuses(submission, "pack", np.array(1, dtype=np.int8))
    refuses(submission, "unpack", oracle.pack(codes).astype(np.int16), (2, 8))
    for fraction in (-0.1, 1.1):
        refuses(submission, "split", [[1, 2]], fraction)


@case
def starting_weights(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=48, layers=1)
    answer = submission.train(text.noise(rng, 8, 4, 6), config)
    complete(answer, config)


@case
def smallest_model(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, vocab=1, dim=1, layers=0, heads=1, context=1, seed=0)
    complete(submission.train([[0, 0], [0]], config), config)
    config = config_of(rng, vocab=1, dim=1, layers=1, heads=1, context=5, seconds=MOMENT)
    for documents in ([[0, 0], [0, 0, 0]], [[0] * 2, [0] * 4, [0] * 6]):
        complete(submission.train(documents, config), config)
    config = config_of(rng, vocab=2, dim=1, layers=1, heads=1, context=1, seconds=MOMENT)
    tensors = submission.train([[0, 1], [1, 0], [0, 1, 0], [1, 1]], config)
    small_lm.perplexity(weights_of(tensors, config), [[0, 1]], config)


@case
def learns_a_rule_two_back(submission: Submission, rng: np.random.Generator) -> None:
    def share(seconds: float) -> float:
        documents = text.renamed_two_back(rng, 12, 160, 25)
        sizes = {"vocab": 12, "heads": 8, "context": 24}
        return share_of_counting(submission, rng, documents, 60, seconds, **sizes)

    _by_rule(share, TWO_BACK_SHARE, "the token two places back decides")


@case
def recalls_the_first_token(submission: Submission, rng: np.random.Generator) -> None:
    def share(seconds: float) -> float:
        documents = text.recalled(rng, 11, 360, 13)
        return share_of_counting(submission, rng, documents, 60, seconds, vocab=11, context=12)

    _by_rule(share, RECALL_SHARE, "a marker calls for the first token")


def _by_rule(share: Callable[[float], float], limit: float, rule: str) -> None:
    """A right answer may be slow or unlucky in a short training, so a long one is granted after it;
    the better counts."""
    reached = share(SHORT_RULE_SECONDS)
    if reached > limit:
        reached = min(reached, share(RULE_SECONDS))
    told = f"{rule}: perplexity {reached:.2f} of that of counting words, on unseen documents"
    expect.that(reached <= limit, told)


@case
def learns(submission: Submission, rng: np.random.Generator) -> None:
    run = trained(submission, rng)
    unseen = run.unseen + run.unseen_prose
    got = small_lm.perplexity(weights_of(run.tensors, run.config), unseen, run.config)
    unigram = text.unigram_perplexity(run.shown, unseen, run.config["vocab"])
    expect.that(
        got <= UNIGRAM_SHARE * unigram,
        f"perplexity {got:.1f} on unseen documents; counting words reaches {unigram:.1f}",
    )


def complete(answer: object, config: dict[str, int]) -> None:
    """All tensors of the model are there, and every one of them is ternary."""
    expect.that(isinstance(answer, dict), f"train gave a {type(answer).__name__}, not a dict")
    assert isinstance(answer, dict)
    shapes = small_lm.tensor_shapes(config)
    expect.equal(sorted(answer), sorted(shapes), "the names of the tensors")
    for name, shape in shapes.items():
        well_formed(answer[name], shape, GROUP, name)


def weights_of(tensors: small_lm.Ternaries, config: dict[str, int]) -> dict[str, np.ndarray]:
    """What a complete set of tensors stands for."""
    complete(tensors, config)
    return small_lm.dense(tensors)


def _sides(
    submission: Submission, documents: list[text.Document], fraction: float
) -> tuple[list[int], list[int]]:
    train, valid = submission.split(documents, fraction)
    return [int(index) for index in train], [int(index) for index in valid]


def speed(submission: Submission, rng: np.random.Generator) -> Call:  # noqa: ARG001 - the hook's form
    """Quantising a large matrix."""
    w = grid(rng, 256, 1024)
    sizes = w.shape, GROUP

    def check(answer: object) -> None:
        codes, scales = well_formed(answer, *sizes, "ternarize")
        error = oracle.squared_error(w, np.repeat(scales.astype(np.float32), GROUP, -1) * codes)
        expect.that(
            error <= ERROR_LIMIT, f"the squared error is {error:.3f} of the squared weights"
        )

    return Call("ternarize", (w, GROUP), check=check)


def precision(submission: Submission, rng: np.random.Generator) -> list[Precision]:
    """Perplexity beside that of the grammar itself and of a dense model of the same form."""
    run = trained(submission, rng)
    truth = np.exp(-np.mean(np.concatenate([run.grammar.log_probs(d) for d in run.unseen])))
    got = small_lm.perplexity(weights_of(run.tensors, run.config), run.unseen, run.config)
    return [Precision(np.array([got]), np.array([truth]), truth * np.array([DENSE_TWIN_EXCESS]))]


#: Perplexity over that of the grammar itself, of the dense twin: the gold trainer without its
#: quantiser, 150 steps, mean of three grammars (1.163, 1.146, 1.110).
DENSE_TWIN_EXCESS = 1.14


def measures(submission: Submission, rng: np.random.Generator) -> dict[str, float]:
    """Perplexity of the trained model on documents of the grammar that it has not seen."""
    run = trained(submission, rng)
    weights = weights_of(run.tensors, run.config)
    return {"perplexity": small_lm.perplexity(weights, run.unseen, run.config)}
