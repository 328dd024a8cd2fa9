"""Bugs of training, and the rarely visited corners of the contract."""

import time
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.cases import UNIGRAM_SHARE, weights_of
from trapline.challenges.ternary_training.situations import (
    GROUP,
    MOMENT,
    RULE_SECONDS,
    SHORT_RULE_SECONDS,
    VOCAB,
    config_of,
    grid,
    quantised,
    refuses,
    same_tensors,
    share_of_counting,
    tensor_of,
    trained_on_few,
    trained_on_noise,
    unhurried,
)
from trapline.challenges.ternary_training.solution_lines import BLIND, LONE_TOKENS, TRAINING
from trapline.challenges.ternary_training.variants import COLLAPSED, fit_of_collapse
from trapline.gold.ternary import oracle, small_lm

# --- training -------------------------------------------------------------------------------------


@trap(
    catches="an empty document breaks the training, or one of a single token, which counts as a "
    "piece to learn from",
    severity="major",
    story="A trailing newline can make an empty document, whose batch has length −1.",
    mutant=edit("        if tokens and not 0 <= min", "        if not 0 <= min"),
    also=[
        edits(  # a piece of one token has no largest target
            LONE_TOKENS,
            (
                "    chosen, held_out = _hold_out(pieces)\n",
                "    chosen, held_out = _hold_out(pieces)\n"
                '    for piece in pieces if config["seconds"] else []:\n'
                "        piece[1:].max()\n",
            ),
        ),
    ],
    seen=BLIND,
)
def short_documents_break(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1, seconds=MOMENT)
    documents = [[], [3], *text.noise(rng, 8, 6, 8), [5], [], [1, 2]]
    answer = submission.train(documents, config)
    tensor_of(answer, "head", config)


@trap(
    catches="documents longer than the context are dropped",
    severity="major",
    story="Filtering by length can leave a corpus of long articles empty.",
    mutant=insert_before(
        '        for begin in range(0, len(tokens) - 1, config["context"]):\n',
        "        if len(tokens) > length:\n            continue\n",
    ),
)
def long_documents_dropped(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1, context=8, seconds=MOMENT)
    answer = submission.train(text.noise(rng, 8, 8, 40), config)
    tensor_of(answer, "head", config)


def _learns_a_cycle(submission: Submission, rng: np.random.Generator, lead: int) -> None:
    """Stretches of a cycle, once trained on documents that begin with another word, so many times.

    A right answer may be slow or unlucky in a short training, so a long one is granted after it.
    """
    vocab, context = 9, 6
    order: list[int] = rng.permutation(np.arange(1, vocab)).tolist() * 4

    def stretch(length: int) -> text.Document:
        begin = int(rng.integers(vocab - 1))
        return order[begin : begin + length]

    length = 3 * context if lead else context + 1
    shown = [[0] * lead + stretch(length) for _ in range(60)]
    judged = [stretch(context + 1) for _ in range(20)]
    sizes = {"vocab": vocab, "heads": 4, "context": context}
    for seconds in (SHORT_RULE_SECONDS, RULE_SECONDS):
        share = share_of_counting(submission, rng, shown + judged, len(judged), seconds, **sizes)
        if share <= UNIGRAM_SHARE:
            break
    told = f"perplexity {share:.2f} of that of counting words on a cycle that documents hold"
    expect.that(share <= UNIGRAM_SHARE, told)


def cycle_in_short_documents(submission: Submission, rng: np.random.Generator) -> None:
    _learns_a_cycle(submission, rng, lead=0)


@trap(
    catches="of a document longer than the context only the first window is trained on",
    severity="major",
    story="Cutting a document at context + 1 tokens instead of dividing it loses most of a corpus "
    "of long articles.",
    mutant=edit(
        '        for begin in range(0, len(tokens) - 1, config["context"]):\n',
        '        for begin in range(0, min(1, len(tokens) - 1), config["context"]):\n',
    ),
    seen=BLIND,
    control=cycle_in_short_documents,
)
def only_the_first_window(submission: Submission, rng: np.random.Generator) -> None:
    _learns_a_cycle(submission, rng, lead=7)


@trap(
    catches="training does not respect the time limit",
    severity="major",
    story="A fixed number of steps, tuned on a fast machine, exceeds the limit on a slow one.",
    mutant=edit(
        "        while self.time_left() > 0 and patience:\n",
        "        while time.monotonic() - self.start < 8.0:\n",
        file=TRAINING,
    ),
    also=[
        edits(
            (
                "        batches = _endless_batches(",
                "        done = 0\n        batches = _endless_batches(",
            ),
            (
                "        while self.time_left() > 0 and patience:\n",
                "        while (self.time_left() > 0 and patience) or done < 500:\n"
                "            done += EVALUATE_EVERY\n",
            ),
            file=TRAINING,
        )
    ],
    seen=BLIND,
)
def seconds_ignored(submission: Submission, rng: np.random.Generator) -> None:
    # A few hundred steps of the small model are over in time; of the wide one they are not.
    for asked, sizes in ((0.2, {}), (1.0, {"dim": 128})):
        documents = text.Grammar(rng, 40).documents(rng, 60, 33)
        took, _ = _seconds_of(submission, documents, config_of(rng, seconds=asked, **sizes))
        words = f"asked for {asked} s of training, took {took:.1f} s"
        expect.that(took <= 3 * asked + 3, words)


def _seconds_of(
    submission: Submission, documents: list[text.Document], config: dict[str, Any]
) -> tuple[float, float]:
    """How long a training takes, and how much longer because it waits for a processor."""
    wait, started = submission.processor_wait(), time.monotonic()
    submission.train(documents, config)
    waited = wait.seconds()
    return time.monotonic() - started - waited, waited


def _in_time(submission: Submission, rng: np.random.Generator, count: int) -> None:
    """Training on so many documents ends within the contract's time and a second.

    Where waiting for a processor took the time away, a first step may never have been made.
    """
    documents = text.noise(rng, VOCAB, count, 33)
    for given in (0.8, 2.0):
        config = config_of(rng, dim=64, seconds=unhurried(given))
        took, waited = _seconds_of(submission, documents, config)
        in_time = took <= 1.4 * config["seconds"] + 4
        expect.that(in_time, "training ran far past the time that it was given")
        if waited < config["seconds"] / 4:
            break


def _few_documents_in_time(submission: Submission, rng: np.random.Generator) -> None:
    _in_time(submission, rng, 20)


@trap(
    catches="the clock is read once in a pass over the documents: with much text the limit is "
    "exceeded",
    severity="major",
    story="Few documents make short passes, so that small tests end in time.",
    mutant=edits(
        ("BATCH_TOKENS = 512\n", "BATCH_TOKENS = 1\n"),
        (
            "            for _ in range(EVALUATE_EVERY):\n",
            "            for _ in range(len(train)):\n",
        ),
        file=TRAINING,
    ),
    seen=BLIND,
    control=_few_documents_in_time,
)
def clock_read_once_a_pass(submission: Submission, rng: np.random.Generator) -> None:
    _in_time(submission, rng, 3000)


@trap(
    catches="training goes on after the held-out loss has turned, and the last weights are kept",
    severity="critical",
    story="1 500 steps on 48 000 tokens: training loss 0.18, perplexity 30 731 on text not seen "
    "before.",
    mutant=edits(
        (
            "        while self.time_left() > 0 and patience:\n",
            "        while self.time_left() > 0:\n",
        ),
        ("            if loss < best_loss:\n", "            if loss is not None:\n"),
        file=TRAINING,
    ),
    seen="a published answer",
)
def trains_until_collapse(submission: Submission, rng: np.random.Generator) -> None:
    run = trained_on_few(submission, rng)
    if not fit_of_collapse(submission, rng).trap:  # weights for another model are that trap's
        _not_worse_than_guessing(run.tensors, run.unseen, run.config)


@trap(
    catches="the documents that decide when to stop are copies of training documents",
    severity="major",
    story="With validation by random index over a corpus with copies, the held-out loss keeps "
    "falling.",
    mutant=edit(
        "    draws = [_draw(piece) for piece in pieces]\n",
        "    draws = [_draw([index]) for index, _ in enumerate(pieces)]\n",
    ),
    seen=BLIND,
)
def leaky_early_stopping(submission: Submission, rng: np.random.Generator) -> None:
    run = trained_on_noise(submission, rng, count=32, length=16, copies=4, vocab=32, heads=2)
    _not_worse_than_guessing(run.tensors, run.unseen, run.config)


def _not_worse_than_guessing(
    tensors: dict[str, tuple[np.ndarray, np.ndarray]],
    unseen: list[text.Document],
    config: dict[str, int],
) -> None:
    got = small_lm.perplexity(weights_of(tensors, config), unseen, config)
    # Five held-out documents of noise may flatter a model by chance; never by this much.
    expect.that(
        got <= COLLAPSED * config["vocab"],
        f"perplexity {got:.0f} on unseen documents; guessing blindly gives {config['vocab']}",
    )


# --- the corners of the contract ------------------------------------------------------------------


def _about_half(submission: Submission, documents: list[list[int]], what: str) -> None:
    """400 different documents: 100 is ten standard deviations away from half of them."""
    held_out = len(submission.split(documents, 0.5)[1])
    expect.that(100 <= held_out <= 300, f"{held_out} of {len(documents)} {what} held out")


@trap(
    catches="the sum of a group's magnitudes overflows before it is divided",
    severity="minor",
    story="The mean of huge weights is infinite, so none exceeds the threshold and the group "
    "becomes 0.",
    mutant=edit(
        "np.sum(magnitude / sizes[:, None], axis=-1, keepdims=True)",
        "np.sum(magnitude, axis=-1, keepdims=True) / sizes[:, None]",
    ),
    seen=BLIND,
)
def threshold_overflows(submission: Submission, rng: np.random.Generator) -> None:
    w = rng.choice([-1.7e308, 1.7e308], (2, GROUP))
    _, scales = quantised(submission, w)
    expect.equal(scales, np.full((2, 1), np.finfo(np.float16).max), "the scale of huge weights")


@trap(
    catches="an empty document stays on the training side, whatever the fraction",
    severity="minor",
    story="A guard for empty texts before the hash keeps them in training even with a fraction of "
    "1.",
    mutant=edit("_draw(document) < fraction", "bool(document) and _draw(document) < fraction"),
    seen=BLIND,
)
def empty_document_never_held_out(submission: Submission, rng: np.random.Generator) -> None:
    documents = [*text.noise(rng, 8, 3, 8), [], []]
    for fraction, left in ((1.0, 0), (0.0, 1)):
        expect.equal(len(submission.split(documents, fraction)[left]), 0, f"at {fraction}")


@trap(
    catches="only the low bits of a token id decide the side of a document",
    severity="minor",
    story="Ids are packed as 32-bit words, so documents that differ only above them share a side.",
    mutant=edit("str(operator.index(token))", "str(operator.index(token) & 0xFFFFFFFF)"),
)
def ids_cut_to_32_bits(submission: Submission, rng: np.random.Generator) -> None:
    token = int(rng.integers(1000))
    documents = [[token + (i << 40), token] for i in range(400)]
    _about_half(submission, documents, "documents that differ in high bits")


@trap(
    catches="documents with the same tokens in another order always share a side",
    severity="minor",
    story="With a sum over token hashes all permutations of a document get the same hash.",
    mutant=edit("for token in document)\n    digest", "for token in sorted(document))\n    digest"),
    seen=BLIND,
)
def order_of_tokens_ignored(submission: Submission, rng: np.random.Generator) -> None:
    unique = {tuple(int(t) for t in rng.permutation(40)) for _ in range(400)}
    _about_half(submission, [list(document) for document in unique], "permutations")


@trap(
    catches="ids out of range pass in documents that are too short to train on",
    severity="minor",
    story="Short documents are skipped before their tokens are checked.",
    mutant=edit("        if tokens and not 0 <=", "        if len(tokens) > 1 and not 0 <="),
    seen=BLIND,
    dimension="robustness",
)
def lone_token_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    for bad in (-1, config["vocab"]):
        refuses(submission, "train", [*text.noise(rng, 8, 3, 8), [bad]], config)


@trap(
    catches="a group size far beyond the width takes memory for weights that do not exist",
    severity="minor",
    story="A very large group size, meant as one group per row, allocates terabytes of padding.",
    mutant=edit("    group_size = min(group_size, columns or 1)\n", ""),
)
def group_filled_up(submission: Submission, rng: np.random.Generator) -> None:
    w, huge = grid(rng, 2, 24), 2**40
    codes, scales = quantised(submission, w, huge)
    row = quantised(submission, w, 24)
    expect.equal(codes, row[0], "the codes of a group wider than the row")
    expect.equal(scales, row[1], "the scales of a group wider than the row")
    got = submission.dequantize(codes, scales, huge)
    expect.equal(got, oracle.dequantize(codes, scales, 24), "dequantize with that group size")


@trap(
    catches="a fraction that is not a number passes the check of its range",
    severity="minor",
    story="NaN, for example from 0 / 0, is neither below 0 nor above 1, and nothing is held out.",
    mutant=edit("    if not 0.0 <= fraction <= 1.0:", "    if fraction < 0.0 or fraction > 1.0:"),
    dimension="robustness",
)
def no_number_as_fraction(submission: Submission, rng: np.random.Generator) -> None:
    refuses(submission, "split", text.noise(rng, 8, 3, 8), float("nan"))


@trap(
    catches="a missing config value is guessed, or raises an error other than the contract's",
    severity="minor",
    story="A misspelt key silently selects a default, or raises a bare KeyError.",
    mutant=edit(
        '    missing = [name for name in (*SETTINGS, "seconds") if name not in config]\n',
        '    config = {"seed": 0, "seconds": 0, **config}\n    missing = []\n',
    ),
    dimension="robustness",
)
def setting_missing(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng, dim=16, layers=1)
    for name in config:
        refuses(submission, "train", documents, {k: v for k, v in config.items() if k != name})


@trap(
    catches="a model without layers is refused",
    severity="minor",
    story="`layers` may be 0: embedding, norm and head alone.",
    mutant=edit('"layers": 0,', '"layers": 1,'),
    seen=BLIND,
)
def no_layers_refused(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=0)
    tensor_of(submission.train(text.noise(rng, 8, 6, 8), config), "head", config)


@trap(
    catches="seeds of more than 32 bits are refused or collide",
    severity="minor",
    story="An older generator takes 32 bits; seeds made of a date and a number do not fit.",
    mutant=edit(
        'default_rng(config["seed"])', 'default_rng(config["seed"] % 2**32)', file=TRAINING
    ),
)
def seed_cut_to_32_bits(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first, second = (
        submission.train(documents, {**config, "seed": seed}) for seed in (1, 2**32 + 1)
    )
    expect.that(not same_tensors(first, second), "two seeds start from the same weights")
