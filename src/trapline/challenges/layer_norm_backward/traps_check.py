"""Bugs of the gradient check."""

from functools import partial

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.layer_norm_backward.cases import (
    NAMES,
    Array,
    Checked,
    Grads,
    Rng,
    check_errors,
    gradient_errors,
    passes,
    problem,
    scaled,
)
from trapline.challenges.layer_norm_backward.solution_lines import STEP
from trapline.gold.norms import oracle

# Parts of the gold solution that several mutants edit.
_DIRECTION = "direction = _direction(rng, inputs[place])"
_ERROR = "float(np.linalg.norm(analytic - numeric) / scale)"


@trap(
    catches="one pair of forward calls for every element of x",
    severity="major",
    story="Every graded answer looped over elements in Python and timed out at D = 1024.",
    mutant=edits(
        ("for _ in range(DIRECTIONS):", "for element in range(inputs[place].size):"),
        (
            _DIRECTION,
            "direction = np.zeros(inputs[place].shape)\n            direction.flat[element] = 1.0",
        ),
    ),
)
def check_needs_every_element(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (4, 16, 8))  # 512 elements
    checked = passes()
    check_errors(gradient_errors(submission, checked, p), None)
    limit = 8 * p.x.shape[-1] + 256
    calls = len(checked.forward.calls)
    expect.that(calls <= limit, f"forward was called {calls} times; {limit} are allowed")


@trap(
    catches="a check by cosine or sign: gradients of the wrong length pass",
    severity="critical",
    story="A missing factor 1/D leaves the direction of the gradient right.",
    mutant=edits(
        (
            "max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)",
            "np.sqrt(np.linalg.norm(analytic) * np.linalg.norm(numeric))",
        ),
        (_ERROR, "float(1 - abs(analytic @ numeric) / max(scale, 1e-12) ** 2)"),
    ),
)
def check_blind_to_length(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    for place, name in enumerate(NAMES):
        spoiled = passes(partial(scaled, place, 1.05))
        check_errors(gradient_errors(submission, spoiled, p), name, low=0.03)


@trap(
    catches="a spot check that never compares most elements",
    severity="critical",
    story="Spot checks at random places were the usual answer to slow loops; an error elsewhere "
    "passes.",
    mutant=insert_after(_DIRECTION, "\n            direction.flat[4:] = 0.0"),
)
def check_of_a_few_elements(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (3, 4, 6))
    for place, name in enumerate(NAMES):
        for element in (0, -1):
            spoiled = passes(partial(_one_element_wrong, place, element))
            check_errors(gradient_errors(submission, spoiled, p), name)


@trap(
    catches="only dx is compared; dgamma and dbeta are reported as right",
    severity="critical",
    story="The difficult formula is tested, and the bug is in one of the two easy sums.",
    mutant=edit("    return errors\n", "    return {**errors, 'dgamma': 0.0, 'dbeta': 0.0}\n"),
)
def check_skips_parameters(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    for place, name in ((1, "dgamma"), (2, "dbeta")):
        spoiled = passes(partial(scaled, place, -1.0))
        check_errors(gradient_errors(submission, spoiled, p), name, low=0.5)


@trap(
    catches="a check that differentiates and propagates with the submission's own passes",
    severity="critical",
    story="The functions given as arguments are ignored in favour of the module's own.",
    mutant=edit(
        "gradients = backward(dy, forward(*inputs)[1])",
        "gradients = layer_norm_backward(dy, layer_norm_forward(*inputs)[1])",
    ),
)
def check_of_itself(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    checked = passes(partial(scaled, 0, 3.0))
    check_errors(gradient_errors(submission, checked, p), "dx", low=0.5)
    expect.that(bool(checked.forward.calls), "gradient_check never called forward")
    expect.that(bool(checked.backward.calls), "gradient_check never called backward")


@trap(
    catches="dy replaced by ones in the numerical part",
    severity="major",
    story="The loss is sum(y): with gamma = 1 its gradient is 0 and everything passes.",
    mutant=edit("dy * (shifted(1.0) - shifted(-1.0))", "shifted(1.0) - shifted(-1.0)"),
)
def check_with_ones(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)


@trap(
    catches="an absolute error reported as a relative one",
    severity="major",
    story="With small upstream gradients every backward pass then looks right to 1e-9.",
    mutant=edit(_ERROR, "float(np.linalg.norm(analytic - numeric))"),
)
def check_absolute(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    for scale in (1e-7, 1e7):
        small = p._replace(dy=p.dy * scale)
        check_errors(gradient_errors(submission, passes(), small), None)
        spoiled = passes(partial(scaled, 0, 2.0))
        errors = gradient_errors(submission, spoiled, small)
        check_errors(errors, "dx", low=0.3)
        expect.that(errors["dx"] < 0.7, f"dx is twice too long, not off by {errors['dx']:.3g}")


@trap(
    catches="0 / 0 where a gradient vanishes",
    severity="major",
    story="An upstream gradient of zero is valid, and the check reports NaN.",
    mutant=edit(
        "max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)", "np.linalg.norm(numeric)"
    ),
)
def check_of_zero_gradients(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    nothing = p._replace(dy=np.zeros_like(p.dy))
    check_errors(gradient_errors(submission, passes(), nothing), None)


@trap(
    catches="a step so large that its own error hides a wrong gradient",
    severity="major",
    story="With h = 1e-2 the tolerance must be so loose that wrong gradients pass.",
    mutant=edit(STEP, "STEP = 0.05"),
)
def check_step_too_large(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)


@trap(
    catches="a step so small that rounding dominates the difference",
    severity="major",
    story="With h = 1e-12 the quotient is rounding noise.",
    mutant=edit(STEP, "STEP = 1e-13"),
)
def check_step_too_small(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)


@trap(
    catches="x shifted in place and not restored",
    severity="major",
    story="`x[i] += h` inside the check; one answer was praised for working on copies.",
    mutant=edit(
        "value + sign * STEP * direction if i == place",
        "value.__iadd__(min(sign, 2 * sign) * STEP * direction) if i == place",
    ),
)
def check_modifies_x(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    p.x[..., 0] *= 1e-15  # adding a step and taking it away again does not bring this back
    sent = (p.x, p.gamma, p.beta, p.dy)
    _, after = submission.observe("gradient_check", *passes(), *sent)
    for name, left, original in zip(("x", "gamma", "beta", "dy"), after[2:], sent, strict=True):
        expect.equal(left, original, f"{name} after the check")


@trap(
    catches="the backward pass is compared with differences of a forward pass other than the one "
    "given",
    severity="major",
    story="The forward pass given as an argument is called only once, for its cache.",
    mutant=edit("return forward(*moved)[0]", "return layer_norm_forward(*moved)[0]"),
)
def check_of_its_own_forward(submission: Submission, rng: Rng) -> None:
    """A forward pass three times too large: its differences are, and no gradient is right."""
    checked = Checked(Stub(_thrice), passes().backward)
    errors = gradient_errors(submission, checked, problem(rng, (2, 3, 5)))
    for name, error in errors.items():
        expect.that(0.6 < error < 0.73, f"{name} is three times too short, not off by {error:.3g}")


@trap(
    catches="the error is divided by the analytic gradient alone",
    severity="minor",
    story="A backward pass that returns zeros is then off by 1e12.",
    mutant=edit("np.linalg.norm(numeric), 1e-12", "1e-12"),
)
def check_relative_to_one_side(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    for place, name in enumerate(NAMES):
        for by, want in ((0.25, 0.75), (4.0, 0.75), (0.0, 1.0)):
            error = gradient_errors(submission, passes(partial(scaled, place, by)), p)[name]
            good = abs(error - want) < 1e-3
            expect.that(good, f"{name} times {by} is off by {want}, not by {error:.3g}")


@trap(
    catches="a forward difference where the contract asks for a central one",
    severity="minor",
    story="Half the calls, and an error as large as the step: right and wrong cannot be told apart "
    "near 1e-5.",
    mutant=edit(
        "(shifted(1.0) - shifted(-1.0))) / (2.0 * STEP)",
        "(shifted(0.01) - shifted(0.0))) / (0.01 * STEP)",
    ),
)
def check_one_sided(submission: Submission, rng: Rng) -> None:
    for name, moves in _moves(submission, rng).items():
        for move in moves:
            opposite = [np.linalg.norm(move + other) for other in moves]
            met = min(opposite) <= 1e-5 * np.linalg.norm(move)
            expect.that(met, f"{name}: an input is moved one way and not the other")


@trap(
    catches="fewer than four directions, unless every element is checked on its own",
    severity="minor",
    story="One random direction for a million elements can miss a wrong one by chance.",
    mutant=edit("DIRECTIONS = 6", "DIRECTIONS = 1"),
)
def check_of_one_direction(submission: Submission, rng: Rng) -> None:
    for name, moves in _moves(submission, rng).items():
        expect.that(len(moves) >= 8, f"{name}: {len(moves)} calls of forward, two a direction")


def _moves(submission: Submission, rng: Rng) -> dict[str, list[Array]]:
    """By how much gradient_check moved gamma and beta in its calls of forward.

    x is left out: several directions of it may share a call, one behind the other in the batch.
    """
    p, checked = problem(rng, (2, 3, 5)), passes()
    gradient_errors(submission, checked, p)
    shifts = {
        "dgamma": [gamma - p.gamma for _, (_, gamma, _) in checked.forward.calls],
        "dbeta": [beta - p.beta for _, (_, _, beta) in checked.forward.calls],
    }
    return {name: [move for move in moves if move.any()] for name, moves in shifts.items()}


def _thrice(x: Array, gamma: Array, beta: Array) -> tuple[Array, tuple[Array, Array]]:
    return 3.0 * oracle.layer_norm(x, gamma, beta), (x, gamma)


def _one_element_wrong(place: int, element: int, grads: Grads) -> Grads:
    wrong: list[Array] = [np.array(gradient) for gradient in grads]
    wrong[place].flat[element] += np.linalg.norm(wrong[place])
    return wrong[0], wrong[1], wrong[2]
