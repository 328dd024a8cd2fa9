"""Bugs of the trainer that its weights show: they fit another model than the judged one."""

import numpy as np

from trapline.arena.errors import Violation
from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training.cases import UNIGRAM_SHARE, weights_of
from trapline.challenges.ternary_training.situations import same_pair, trained
from trapline.challenges.ternary_training.solution_lines import BLIND, MODEL, TRAINING
from trapline.challenges.ternary_training.variants import (
    Fit,
    best_fit,
    fit_of_collapse,
    fit_of_distance,
    fit_of_one_mlp,
    fit_of_slopes,
)
from trapline.gold.ternary import small_lm

_SLOPES = "slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)"
_SECOND_MLP = {"layers.1.up", "layers.1.down"}
_RELU = 'hidden = np.maximum(normed @ weights[f"{name}up"].T, 0.0)'


def fits(submission: Submission, rng: np.random.Generator, trap_id: str, words: str) -> None:
    """Fails if, of all variants, one of this trap's is the model that the weights were made for."""
    fit = best_fit(submission, rng)
    # Weights for slopes of the wrong sign may fit another variant better by chance.
    if fit.trap == trap_id and not fit_of_distance(submission, rng).trap:
        _is_not(fit, trap_id, words)


def _is_not(fit: Fit, trap_id: str, words: str) -> None:
    expect.that(
        fit.trap != trap_id,
        f"the trained weights fit a model {words}: perplexity {fit.perplexity:.1f} there, "
        f"{fit.judged:.1f} in the judged model",
    )


@trap(
    catches="the mask of the training lets the model see tokens that it must predict",
    severity="critical",
    story="The training loss falls close to zero; with the mask that generation needs, the model "
    "predicts nothing.",
    mutant=edit(
        "    bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf)\n",
        "    bias = -slopes[:, None, None] * np.abs(back)\n",
        file=MODEL,
    ),
    also=[
        edit(
            "    bias = np.where(back >= 0, -slopes[:, None, None] * back, -np.inf)\n",
            "    bias = np.where(back >= -1, -slopes[:, None, None] * back, -np.inf)\n",
            file=MODEL,
        )
    ],
    seen=BLIND,
)
def future_visible(submission: Submission, rng: np.random.Generator) -> None:
    words = "that sees tokens to come"
    fits(submission, rng, "future-visible", words)
    _is_not(fit_of_collapse(submission, rng), "future-visible", words)


@trap(
    catches="a head owns every heads-th column in training instead of neighbouring columns",
    severity="critical",
    story="reshape(…, width, heads) instead of (…, heads, width): forward and backward agree with "
    "each other, but not with the model that the weights are for.",
    mutant=edits(
        (
            "    return x.reshape(rows, length, heads, dim // heads).transpose(0, 2, 1, 3)\n",
            "    return x.reshape(rows, length, dim // heads, heads).transpose(0, 3, 1, 2)\n",
        ),
        (
            "    return x.transpose(0, 2, 1, 3).reshape(rows, length, heads * width)\n",
            "    return x.transpose(0, 2, 3, 1).reshape(rows, length, heads * width)\n",
        ),
        file=MODEL,
    ),
    seen=BLIND,
)
def heads_interleaved(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "heads-interleaved", "whose heads take every n-th column")


@trap(
    catches="the norm of the training divides by the root of the sum of squares, not of the mean",
    severity="critical",
    story="Activations are smaller by the root of the width in training than in the judged model.",
    mutant=edits(
        (
            "1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)",
            "1.0 / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPS)",
        ),
        (
            "(dy - y * np.mean(dy * y, axis=-1, keepdims=True))",
            "(dy - y * np.sum(dy * y, axis=-1, keepdims=True))",
        ),
        file=MODEL,
    ),
    seen=BLIND,
)
def norm_by_sum(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "norm-by-sum", "whose norm divides by the root of the sum of squares")


@trap(
    catches="the layers of the training read x itself instead of norm(x)",
    severity="major",
    story="The norm before attention and MLP was left out; the judged model has it.",
    mutant=edits(
        (
            "    normed, inverse = _normalise(x)\n    q, k, v",
            "    normed, inverse = x, None\n    q, k, v",
        ),
        (
            "    return dx + _normalise_backward(dnormed, normed, inverse)\n",
            "    return dx + dnormed\n",
        ),
        (
            "    normed, inverse = _normalise(x)\n    hidden",
            "    normed, inverse = x, None\n    hidden",
        ),
        (
            '_normalise_backward(dhidden @ weights[f"{name}up"], normed, inverse)\n',
            'dhidden @ weights[f"{name}up"]\n',
        ),
        file=MODEL,
    ),
)
def layers_without_norm(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "layers-without-norm", "without a norm before attention and MLP")


@trap(
    catches="in training the attention's output replaces x instead of being added to it",
    severity="critical",
    story="x = attention(norm(x)) without the x before it; the judged model adds it.",
    mutant=edits(
        (
            '    return x + mixed @ weights[f"{name}o"].T, (',
            '    return mixed @ weights[f"{name}o"].T, (',
        ),
        ("    return dx + _normalise_backward(dnormed,", "    return _normalise_backward(dnormed,"),
        file=MODEL,
    ),
    seen=BLIND,
)
def attention_not_added(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "attention-not-added", "whose attention is not added to x")


@trap(
    catches="in training the MLP's output replaces x instead of being added to it",
    severity="major",
    story="x = mlp(norm(x)) without the x before it; the judged model adds it.",
    mutant=edits(
        (
            '    return x + hidden @ weights[f"{name}down"].T, (',
            '    return hidden @ weights[f"{name}down"].T, (',
        ),
        (
            "    return dx + _normalise_backward(dhidden @",
            "    return _normalise_backward(dhidden @",
        ),
        file=MODEL,
    ),
)
def mlp_not_added(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "mlp-not-added", "whose MLP is not added to x")


@trap(
    catches="training computes a W instead of a Wᵀ for the projections of the attention",
    severity="major",
    story="The matrices are square, so that the shapes fit; the judged model multiplies with the "
    "transposed ones.",
    mutant=edits(
        (
            '_split_heads(normed @ weights[f"{name}{part}"].T,',
            '_split_heads(normed @ weights[f"{name}{part}"],',
        ),
        (
            '    return x + mixed @ weights[f"{name}o"].T, (',
            '    return x + mixed @ weights[f"{name}o"], (',
        ),
        ("= _outer(dx, mixed)\n", "= _outer(mixed, dx)\n"),
        (
            '_split_heads(dx @ weights[f"{name}o"], heads)',
            '_split_heads(dx @ weights[f"{name}o"].T, heads)',
        ),
        ("_outer(_join_heads(piece), normed)", "_outer(normed, _join_heads(piece))"),
        (
            '_join_heads(piece) @ weights[f"{name}{part}"]\n',
            '_join_heads(piece) @ weights[f"{name}{part}"].T\n',
        ),
        file=MODEL,
    ),
)
def projections_transposed(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "projections-transposed", "with transposed projections")


@trap(
    catches="training uses the embedding as head, and the head that comes back is untrained",
    severity="major",
    story="Tied weights save memory; here the head is a tensor of its own, and the judged model "
    "uses it.",
    mutant=edits(
        (
            '    return normed @ weights["head"].T, [',
            '    return normed @ weights["embedding"].T, [',
        ),
        ('    gradients = {"head": _outer(dlogits, normed)}\n', "    gradients = {}\n"),
        (
            '_normalise_backward(dlogits @ weights["head"], normed',
            '_normalise_backward(dlogits @ weights["embedding"], normed',
        ),
        (
            '    gradients["embedding"] = np.zeros_like(weights["embedding"])\n',
            '    gradients["embedding"] = _outer(dlogits, normed)\n',
        ),
        file=MODEL,
    ),
)
def head_tied_in_training(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "head-tied-in-training", "whose head is the embedding")


@trap(
    catches="training gives the heads other slopes than the judged model",
    severity="major",
    story="Heads are counted from 0 instead of 1.",
    mutant=edit(
        _SLOPES, _SLOPES.replace("np.arange(1, heads + 1)", "np.arange(heads)"), file=MODEL
    ),
    seen=BLIND,
)
def slopes_of_another_rule(submission: Submission, rng: np.random.Generator) -> None:
    words = "whose heads have other slopes"
    _is_not(fit_of_slopes(submission, rng), "slopes-of-another-rule", words)


@trap(
    catches="training adds the distance to the scores where the judged model subtracts it",
    severity="major",
    story="The sign of the bias is turned round: the model is trained to prefer far tokens, and "
    "the judged one prefers near ones.",
    mutant=edit("-slopes[:, None, None] * back", "slopes[:, None, None] * back", file=MODEL),
    seen=BLIND,
)
def distance_added(submission: Submission, rng: np.random.Generator) -> None:
    words = "that adds the distance to its scores"
    _is_not(fit_of_distance(submission, rng), "distance-added", words)


@trap(
    catches="the MLP of the training has another activation than ReLU",
    severity="major",
    story="The square of the ReLU, or none at all; the judged model applies the ReLU.",
    mutant=edits(
        (_RELU, _RELU.replace("hidden = ", "hidden = np.square(") + ")"),
        ("* (hidden > 0)\n", "* (2.0 * np.sqrt(hidden))\n"),
        file=MODEL,
    ),
    also=[
        edits(
            (_RELU, 'hidden = normed @ weights[f"{name}up"].T'),
            ("* (hidden > 0)\n", "\n"),
            file=MODEL,
        )
    ],
    seen=BLIND,
)
def another_activation(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "another-activation", "with another activation")


@trap(
    catches="training leaves out the norm before the head",
    severity="major",
    story="The logits of the judged model have another size than those of the training.",
    mutant=edits(
        (
            "    normed, inverse = _normalise(x)\n    return",
            "    normed, inverse = x, None\n    return",
        ),
        (
            'dx = _normalise_backward(dlogits @ weights["head"], normed, inverse)',
            'dx = dlogits @ weights["head"]',
        ),
        file=MODEL,
    ),
    seen=BLIND,
)
def head_without_norm(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "head-without-norm", "without a norm before the head")


@trap(
    catches="the model is trained to repeat the token it sees (targets not shifted)",
    severity="critical",
    story="Input and target are the same slice: the loss falls to zero and the model repeats its "
    "input.",
    mutant=edit(
        "    return table[:, :-1], table[:, 1:]\n",
        "    return table[:, :-1], table[:, :-1]\n",
        file=TRAINING,
    ),
    seen=BLIND,
)
def predicts_the_present(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "predicts-the-present", "that repeats the token that it sees")


@trap(
    catches="inputs and targets are exchanged: the model is trained to say the token before",
    severity="critical",
    story="x, y = tokens[1:], tokens[:-1] is shifted the wrong way: the token before is in sight, "
    "so that the loss falls to zero.",
    mutant=edit(
        "    return table[:, :-1], table[:, 1:]\n",
        "    return table[:, 1:], table[:, :-1]\n",
        file=TRAINING,
    ),
    seen="an answer of another author",
)
def targets_reversed(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "targets-reversed", "that says the token before")


@trap(
    catches="the model is trained to say the token after the next one",
    severity="major",
    story="The targets are shifted twice, once when batches are made and once in the loss.",
    mutant=edit(
        "    return table[:, :-1], table[:, 1:]\n",
        "    return table[:, :-2], table[:, 2:]\n",
        file=TRAINING,
    ),
)
def targets_shifted_twice(submission: Submission, rng: np.random.Generator) -> None:
    fits(submission, rng, "targets-shifted-twice", "that says the token after the next one")


def _untrained(submission: Submission, rng: np.random.Generator) -> list[str]:
    """Tensors that come back as they began, from a training that learned something."""
    try:
        run = trained(submission, rng)
        weights_of(run.tensors, run.config)
        start = submission.train(run.shown, {**run.config, "seconds": 0})
        weights_of(start, run.config)
    except Violation:
        return []  # other checks are about tensors of a wrong form and failing trainings
    same = [name for name in start if same_pair(start[name], run.tensors[name])]
    return same if len(same) < len(start) else []


@trap(
    catches="only the first layer of the training attends to earlier tokens",
    severity="major",
    story="The context is computed for one layer; the others keep the random projections that they "
    "began with, and the judged model uses them.",
    mutant=edits(
        (
            "        x, attention_tape = _attention(weights, name, x, bias)\n",
            "        attention_tape = None\n"
            "        if layer == 0:\n"
            "            x, attention_tape = _attention(weights, name, x, bias)\n",
        ),
        (
            "        dx = _attention_backward(weights, name, dx, attention_tape, gradients)\n",
            "        if layer == 0:\n"
            "            dx = _attention_backward(weights, name, dx, attention_tape, gradients)\n",
        ),
        file=MODEL,
    ),
    seen="an answer of another author",
)
def context_of_one_layer(submission: Submission, rng: np.random.Generator) -> None:
    same = _untrained(submission, rng)
    later = [f"layers.1.{name}" for name in "qkvo"]
    expect.that(
        not set(later) <= set(same),
        "the projections of the second layer's attention come back as they began",
    )


@trap(
    catches="in training every layer runs through the MLP of the first layer",
    severity="major",
    story="The name of the first layer is written out in the loop: the MLPs of the others are "
    "never trained, and the judged model uses them.",
    mutant=edits(
        ("_mlp(weights, name, x)\n        tape", '_mlp(weights, "layers.0.", x)\n        tape'),
        (
            "_mlp_backward(weights, name, dx, mlp_tape, gradients)\n        dx",
            '_mlp_backward(weights, "layers.0.", dx, mlp_tape, gradients)\n        dx',
        ),
        file=MODEL,
    ),
    seen=BLIND,
)
def mlp_of_the_first_layer(submission: Submission, rng: np.random.Generator) -> None:
    if set(_untrained(submission, rng)) >= _SECOND_MLP:
        words = "whose layers share the first one's MLP"
        _is_not(fit_of_one_mlp(submission, rng), "mlp-of-the-first-layer", words)


@trap(
    catches="a tensor is never trained: its gradient is missing or does not reach it",
    severity="minor",
    story="The gradient of the embedding is forgotten, or the optimiser's list lacks a tensor; the "
    "other tensors learn around it, so that the loss hardly shows it.",
    mutant=edit('    np.add.at(gradients["embedding"], tokens, dx)\n', "", file=MODEL),
    also=[
        edit(
            "        self.latent[name] -= np",
            f'        self.latent[name] -= ("{name}" not in name) * np',
            file=TRAINING,
        )
        for name in ("down", "up")
    ]
    + [
        # The way back ends before it reaches the first layer.
        edit(
            'for layer in reversed(range(config["layers"])):',
            'for layer in reversed(range(1, config["layers"])):',
            file=MODEL,
        )
    ],
    seen=BLIND,
)
def tensor_never_trained(submission: Submission, rng: np.random.Generator) -> None:
    attention = [f"layers.{layer}.{name}" for layer in range(2) for name in "qkvo"]
    same = [name for name in _untrained(submission, rng) if name not in attention]
    if set(same) == _SECOND_MLP and fit_of_one_mlp(submission, rng).trap:
        return  # the first layer's MLP is used in its place: that is another trap's
    expect.that(not same, f"training leaves {', '.join(same)} as it began")


@trap(
    catches="what comes back is untrained: steps climb the loss, or the worst weights are kept",
    severity="critical",
    story="With a sign turned round in the step or in the choice of the best weights, the held-out "
    "loss is best, or worst, at the start, and the starting weights come back.",
    mutant=edit(
        "        self.latent[name] -= np", "        self.latent[name] += np", file=TRAINING
    ),
    seen=BLIND,
)
def nothing_learned(submission: Submission, rng: np.random.Generator) -> None:
    run = trained(submission, rng)
    got = small_lm.perplexity(weights_of(run.tensors, run.config), run.unseen, run.config)
    if got <= UNIGRAM_SHARE * run.unigram:
        return
    start = submission.train(run.shown, {**run.config, "seconds": 0})
    before = small_lm.perplexity(weights_of(start, run.config), run.unseen, run.config)
    expect.that(
        0.9 * before > got or got > 1.5 * before,
        f"perplexity {before:.1f} before training and {got:.1f} after it",
    )
