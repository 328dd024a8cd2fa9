"""Bugs of the gradient check."""

from collections.abc import Iterable
from functools import partial

import numpy as np

from trapline.arena.errors import SubmissionRaised
from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.layer_norm_backward.cases import (
    NAMES,
    Array,
    Checked,
    Grads,
    Problem,
    Rng,
    Spoil,
    check_errors,
    gradient_errors,
    passes,
    problem,
    scaled,
)
from trapline.challenges.layer_norm_backward.situations import WRITTEN_BLIND, right_passes
from trapline.challenges.layer_norm_backward.solution_lines import STEP
from trapline.gold.norms import oracle

# Parts of the gold solution that several mutants edit.
_DIRECTION = "direction = _direction(rng, inputs[place])"
_ERROR = "float(np.linalg.norm(analytic - numeric) / scale)"
_SCALE = "max(np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12)"
_GRADIENTS = "gradients = backward(dy, forward(*inputs)[1])"
_SLOPE = "_slope(forward, inputs, place, direction, dy)"
#: Which input is moved for dx, dgamma and dbeta.
_OTHERS = "(0, 2, 2)", "(0, 2, 1)"
_RETURN = "    return errors\n"
_ASKED = "        return forward(*moved)[0]\n"
_CENTRAL = "(shifted(1.0) - shifted(-1.0))) / (2.0 * STEP)"


@trap(
    catches="one pair of forward calls for every element of x",
    severity="major",
    story="The number of elements of x grows with B · T; the calls that are allowed do not.",
    seen=WRITTEN_BLIND,
    control=right_passes,
    mutant=edits(
        ("for _ in range(DIRECTIONS):", "for element in range(inputs[place].size):"),
        (
            _DIRECTION,
            "direction = np.zeros(inputs[place].shape)\n            direction.flat[element] = 1.0",
        ),
    ),
)
def check_needs_every_element(submission: Submission, rng: Rng) -> None:
    _counts_calls(submission, problem(rng, (4, 16, 8)))  # 512 elements


def _counts_calls(submission: Submission, p: Problem) -> None:
    checked = passes()
    gradient_errors(submission, checked, p)
    limit = 8 * p.x.shape[-1] + 256
    calls = len(checked.forward.calls)
    expect.that(calls <= limit, f"forward was called {calls} times; {limit} are allowed")


@trap(
    catches="the check takes so many directions that a narrow x has more calls of forward than are "
    "allowed, whatever the number of its elements",
    severity="minor",
    story="8 · D + 256 calls are many for a wide x; for D = 4 they are 288.",
    seen=WRITTEN_BLIND,
    control=right_passes,
    mutant=edit("range(DIRECTIONS)", "range(64)"),
    also=[edit("range(DIRECTIONS)", f"range({count})") for count in (96, 128)],
)
def check_of_too_many_directions(submission: Submission, rng: Rng) -> None:
    """So few elements that one pair of calls for each is allowed."""
    _counts_calls(submission, problem(rng, (2, 3, 4)))


@trap(
    catches="the numerical derivative of one parameter moves the other one",
    severity="critical",
    story="A right gradient is reported as wrong: beta's is compared with the slope along gamma.",
    seen=WRITTEN_BLIND,
    mutant=edit(_SLOPE, _SLOPE.replace("place", "min(place, 1)")),
    also=[edit(_SLOPE, _SLOPE.replace("place", f"{other}[place]")) for other in _OTHERS],
)
def check_moves_another_input(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, passes(), problem(rng, (2, 3, 6))), None)


@trap(
    catches="a check by cosine or sign: gradients of the wrong length pass",
    severity="major",
    story="A missing factor 1/D leaves the direction of the gradient right.",
    mutant=edits(
        (
            _SCALE,
            "np.sqrt(np.linalg.norm(analytic) * np.linalg.norm(numeric))",
        ),
        (_ERROR, "float(1 - abs(analytic @ numeric) / max(scale, 1e-12) ** 2)"),
    ),
)
def check_blind_to_length(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    for place, name in enumerate(NAMES):
        spoiled = passes(partial(scaled, place, 1.05))
        _check_noticed(submission, spoiled, p, name, low=0.02)


@trap(
    catches="a spot check that never compares most elements",
    severity="major",
    story="Spot checks at random places are fast, and an error elsewhere passes.",
    seen=WRITTEN_BLIND,
    control=right_passes,
    mutant=insert_after(_DIRECTION, "\n            direction.flat[6:] = 0.0"),
    also=[insert_after(_DIRECTION, "\n            direction[1:] = 0.0")],
)
def check_of_a_few_elements(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (3, 4, 6))
    for place, name in enumerate(NAMES):
        for element in (0, -1):
            spoiled = passes(partial(_one_element_wrong, place, element))
            _check_noticed(submission, spoiled, p, name, low=1e-4)


@trap(
    catches="only dx is compared; dgamma and dbeta are reported as right",
    severity="major",
    story="The difficult formula is tested, and the bug is in one of the two easy sums.",
    mutant=edit(_RETURN, "    return {**errors, 'dgamma': 0.0, 'dbeta': 0.0}\n"),
)
def check_skips_parameters(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    for place, name in ((1, "dgamma"), (2, "dbeta")):
        spoiled = passes(partial(scaled, place, -1.0))
        _check_noticed(submission, spoiled, p, name, low=0.5)


@trap(
    catches="a check that differentiates and propagates with the submission's own passes",
    severity="major",
    story="The functions given as arguments are ignored in favour of the module's own.",
    mutant=edit(_GRADIENTS, "gradients = layer_norm_backward(dy, layer_norm_forward(*inputs)[1])"),
)
def check_of_itself(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    checked = passes(partial(scaled, 0, 3.0))
    _check_noticed(submission, checked, p, "dx", low=0.4)
    expect.that(bool(checked.forward.calls), "gradient_check never called forward")
    expect.that(bool(checked.backward.calls), "gradient_check never called backward")


@trap(
    catches="dy replaced by ones in the numerical part",
    severity="major",
    story="The loss is sum(y): with gamma = 1 its gradient is 0 and everything passes.",
    mutant=edit("dy * (shifted(1.0) - shifted(-1.0))", "shifted(1.0) - shifted(-1.0)"),
    seen=WRITTEN_BLIND,
)
def check_with_ones(submission: Submission, rng: Rng) -> None:
    _errors_of_threes(submission, rng)


@trap(
    catches="the backward pass under test is given a dy of ones instead of dy",
    severity="major",
    story="The loss is sum(y) in the analytic part and sum(dy · y) in the numerical one.",
    mutant=edit(_GRADIENTS, _GRADIENTS.replace("backward(dy,", "backward(np.ones(x.shape),")),
)
def check_propagates_ones(submission: Submission, rng: Rng) -> None:
    _errors_of_threes(submission, rng)


@trap(
    catches="the central difference is divided by the step instead of twice the step",
    severity="critical",
    story="Every right backward pass is reported with an error of one half.",
    mutant=edit("/ (2.0 * STEP)", "/ STEP"),
    seen=WRITTEN_BLIND,
)
def check_not_halved(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    check_errors(gradient_errors(submission, _linear(), p), None)


@trap(
    catches="an absolute error reported as a relative one",
    severity="major",
    story="With small upstream gradients every backward pass then looks right to 1e-9.",
    mutant=edit(_ERROR, "float(np.linalg.norm(analytic - numeric))"),
    seen=WRITTEN_BLIND,
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
    mutant=edit(_SCALE, "np.linalg.norm(numeric)"),
    # Without a floor the answer is NaN, what stands for it, or no answer.
    also=[
        edits((_SCALE, _SCALE.replace(", 1e-12", "")), (_ERROR, error))
        for error in (
            _ERROR,
            _ERROR.replace("float(", "float(np.nan_to_num(").replace(
                "scale)", "scale, nan=np.inf))"
            ),
            "float(np.linalg.norm(analytic - numeric)) / float(scale)",
        )
    ],
    seen=WRITTEN_BLIND,
    control=right_passes,
)
def check_of_zero_gradients(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    nothing = p._replace(dy=np.zeros_like(p.dy))
    check_errors(gradient_errors(submission, passes(), nothing), None)


@trap(
    catches="a step so large that its own error hides a wrong gradient",
    severity="major",
    story="With h = 1e-2 the tolerance must be so loose that wrong gradients pass.",
    mutant=edit(STEP, "STEP = 0.2"),
    also=[edit(STEP, f"STEP = {step}") for step in ("0.1", "1e-2")],
)
def check_step_too_large(submission: Submission, rng: Rng) -> None:
    """Inputs that drift give errors below 1e-3 as well; a step of 0.2 does not."""
    errors = gradient_errors(submission, passes(), problem(rng, (2, 3, 6)))
    for name, error in errors.items():
        expect.that(error < 1e-3, f"a right {name} gets an error of {error:.3g}, above 0.001")
    check_errors(errors, None)


@trap(
    catches="a step so small that rounding dominates the difference",
    severity="major",
    story="With h = 1e-12 the quotient is rounding noise.",
    seen=WRITTEN_BLIND,
    mutant=edit(STEP, "STEP = 1e-13"),
)
def check_step_too_small(submission: Submission, rng: Rng) -> None:
    """A linear forward pass has no error but rounding."""
    p = problem(rng, (2, 3, 6))
    check_errors(gradient_errors(submission, _linear(), p), None)


@trap(
    catches="x shifted in place and not restored",
    severity="major",
    story="`x[i] += h` inside the check: the inputs drift, and later slopes are taken elsewhere.",
    seen=WRITTEN_BLIND,
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


def _moved_back(where: str) -> Mutant:
    """These inputs are moved in place, and back by taking the step away."""
    return edit(
        _ASKED,
        "        step = sign * STEP * direction\n"
        f"        if {where}:\n"
        "            inputs[place][...] += step\n"
        "            moved = inputs\n"
        "        answer = forward(*moved)[0]\n"
        f"        if {where}:\n"
        "            inputs[place][...] -= step\n"
        "        return answer\n",
    )


@trap(
    catches="the check moves x itself and moves it back by taking the step away: rounding changes "
    "its last bits",
    severity="minor",
    story="(x + h) − h is not always x, least of all where x is much smaller than h.",
    seen=WRITTEN_BLIND,
    mutant=_moved_back("place == 0"),
    also=[_moved_back("True")],
    control=right_passes,
)
def check_moves_x_back(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (3, 4, 6))
    p.x[..., 1:3] *= 1e-15
    _, after = submission.observe("gradient_check", *passes(), p.x, p.gamma, p.beta, p.dy)
    expect.equal(after[2], p.x, "x after the check")


@trap(
    catches="the backward pass is compared with differences of a forward pass other than the one "
    "given",
    severity="major",
    story="The forward pass given as an argument is called only once, for its cache.",
    mutant=edit("return forward(*moved)[0]", "return layer_norm_forward(*moved)[0]"),
    seen=WRITTEN_BLIND,
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
    _errors_of_scaled(submission, rng, 0.25, 0.75)


@trap(
    catches="the error is divided by the numerical gradient alone",
    severity="minor",
    story="A gradient that is twice too long is then off by 1 instead of 1/2.",
    mutant=edit(
        "np.linalg.norm(analytic), np.linalg.norm(numeric), 1e-12", "np.linalg.norm(numeric), 1e-12"
    ),
    seen=WRITTEN_BLIND,
)
def check_relative_to_the_numerical(submission: Submission, rng: Rng) -> None:
    _errors_of_scaled(submission, rng, 4.0, 0.75)


@trap(
    catches="the error is divided by |a| + |n| instead of the larger of the two",
    severity="minor",
    story="Another usual definition: its errors are half as large near 0, and never above 1.",
    mutant=edit(_SCALE, "max(np.linalg.norm(analytic) + np.linalg.norm(numeric), 1e-12)"),
    seen=WRITTEN_BLIND,
)
def check_relative_to_the_sum(submission: Submission, rng: Rng) -> None:
    _errors_of_scaled(submission, rng, 2.0, 0.5)


@trap(
    catches="the error is squared: the root of the 2-norm is missing",
    severity="minor",
    story="An error of 1e-2 is then reported as 1e-4.",
    mutant=edit(_ERROR, "float((np.linalg.norm(analytic - numeric) / scale) ** 2)"),
)
def check_squared(submission: Submission, rng: Rng) -> None:
    _errors_of_scaled(submission, rng, 2.0, 0.5)


@trap(
    catches="dbeta is never compared and reported as right",
    severity="major",
    story="dbeta is a plain sum, and so it is left out.",
    mutant=edit(_RETURN, "    return {**errors, 'dbeta': 0.0}\n"),
)
def check_skips_dbeta(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    checked = passes(partial(scaled, 2, -1.0))
    _check_noticed(submission, checked, p, "dbeta", low=0.4)


@trap(
    catches="one error for all three gradients instead of one for each",
    severity="minor",
    story="A wrong dbeta is then reported as a wrong dx.",
    mutant=edit(_RETURN, "    return dict.fromkeys(errors, max(errors.values()))\n"),
    seen=WRITTEN_BLIND,
)
def check_reports_the_largest(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    checked = passes(partial(scaled, 1, 2.0))
    check_errors(gradient_errors(submission, checked, p), "dgamma", low=0.3)


@trap(
    catches="x with strides is moved in a copy: the numerical dx is 0",
    severity="major",
    story="`x.reshape(-1)` is a view of a packed array and a copy of any other.",
    mutant=edits(
        (
            "value + sign * STEP * direction if i == place",
            "_moved(value, sign * STEP * direction) if i == place",
        ),
        (
            "def _relative_error(",
            "def _moved(value, step):\n"
            "    value = value.copy(order='K')\n"
            "    flat = value.reshape(-1)\n"
            "    flat += step.reshape(-1)\n"
            "    return value\n\n\n"
            "def _relative_error(",
        ),
    ),
    control=right_passes,
)
def check_of_strided_x(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    errors = gradient_errors(submission, _linear(), p._replace(x=np.asfortranarray(p.x)))
    check_errors(errors, None)


def _one_way(step: float, where: str = "place == 0") -> Mutant:
    """A step ahead only, for some of the inputs."""
    back = f"(0.0 if {where} else -1.0)"
    return edits(
        (STEP, f"STEP = {step}"),
        (_CENTRAL, f"(shifted(1.0) - shifted({back}))) / ((1.0 - {back}) * STEP)"),
    )


def linear_passes(submission: Submission, rng: Rng) -> None:
    """A control: a forward pass of which forward differences are exact, too."""
    check_errors(gradient_errors(submission, _linear(), problem(rng, (2, 3, 6))), None)


@trap(
    catches="a forward difference where the contract asks for a central one",
    severity="minor",
    story="Half the calls, and an error as large as the step: right and wrong cannot be told apart "
    "near 1e-5.",
    mutant=edit(_CENTRAL, "(shifted(0.01) - shifted(0.0))) / (0.01 * STEP)"),
    also=[
        edit(_CENTRAL, "(shifted(1.0) - shifted(0.0))) / STEP"),
        *map(_one_way, (3e-5, 1e-4, 1e-3)),
        *(_one_way(6e-6, f"place == {place}") for place in (1, 2)),
    ],
    seen=WRITTEN_BLIND,
    control=linear_passes,
)
def check_one_sided(submission: Submission, rng: Rng) -> None:
    for name, moves in _moves(submission, rng).items():
        for move in moves:
            opposite = [np.linalg.norm(move + other) for other in moves]
            met = min(opposite) <= 1e-5 * np.linalg.norm(move)
            expect.that(met, f"{name}: an input is moved one way and not the other")


_EACH_ELEMENT = (
    ("for _ in range(DIRECTIONS):", "for element in range(min(inputs[place].size, 40)):"),
    (
        _DIRECTION,
        "direction = _direction(rng, inputs[place])\n"
        "            if direction.size <= 40:\n"
        "                direction = np.zeros(direction.shape)\n"
        "                direction.flat[element] = 1.0",
    ),
)


@trap(
    catches="the largest relative error of a single derivative instead of the ratio of the norms",
    severity="minor",
    story="Where one derivative is 0, its rounding error is compared with itself.",
    mutant=edits(
        *_EACH_ELEMENT,
        (
            _ERROR,
            "float(np.max(np.abs(analytic - numeric) / np.maximum("
            "np.maximum(np.abs(analytic), np.abs(numeric)), 1e-12)))",
        ),
    ),
    seen=WRITTEN_BLIND,
    control=right_passes,
)
def check_by_element(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    dy = p.dy.copy()
    dy[0, 0, 3:] -= dy[..., 3:].sum((0, 1))
    check_errors(gradient_errors(submission, passes(), p._replace(dy=dy)), None)


@trap(
    catches="fewer than four directions, unless every element is checked on its own",
    severity="minor",
    story="One random direction for a million elements can miss a wrong one by chance.",
    mutant=edit("DIRECTIONS = 6", "DIRECTIONS = 1"),
    also=[edit("spread * rng.choice(", "spread * np.random.default_rng(1).choice(")],
    seen=WRITTEN_BLIND,
    control=right_passes,
)
def check_of_one_direction(submission: Submission, rng: Rng) -> None:
    for name, moves in _moves(submission, rng).items():
        different = np.linalg.matrix_rank(np.array(moves or [np.zeros(1)]), rtol=1e-3)
        expect.that(different >= 4, f"{name}: {different} different directions, 4 are asked for")


@trap(
    catches="a random direction leaves elements where they are: its signs may be 0",
    severity="minor",
    story="Signs are drawn from -1, 0 and 1, and of a large input some elements are moved by no "
    "direction at all.",
    mutant=edit(
        "rng.choice([-1.0, 1.0], value.shape)", "rng.choice([-1.0, 0.0, 1.0], value.shape)"
    ),
    seen=WRITTEN_BLIND,
    control=linear_passes,
)
def check_of_directions_with_zeros(submission: Submission, rng: Rng) -> None:
    # gamma and beta have so few elements that a spot check moves as many of them.
    moves = _moves(submission, rng).get("dx", [])
    moved = [np.abs(move) > 1e-9 * np.abs(move).max() for move in moves]
    full = sum(bool(places.all()) for places in moved)
    parts = {places.tobytes(): places for places in moved}.values()
    # Where the same elements, or only a few, are moved each time, other checks notice it.
    others = len(parts) < 2 or float(np.mean(moved)) < 1 / 4
    good = others or full >= 4 or _once_each(parts) or _spans(moves)
    expect.that(good, "dx: fewer than 4 directions move every element")


def _once_each(parts: Iterable[Array]) -> bool:
    """Parts of the input are moved in turn, and each element is in one of them."""
    return bool((np.sum([*parts], axis=0) == 1).all())


def _spans(moves: list[Array]) -> bool:
    """The derivatives along these directions say that of every element."""
    return int(np.linalg.matrix_rank(np.array(moves), rtol=1e-3)) == moves[0].size


def _moves(submission: Submission, rng: Rng) -> dict[str, list[Array]]:
    """By how much gradient_check moved each input in its calls of forward.

    The forward pass is linear, so that the errors are 0 whatever the steps are. Calls with more
    rows are left out: there several directions of x lie one behind the other.
    """
    p, checked = problem(rng, (2, 3, 16)), _linear()
    gradient_errors(submission, checked, p)
    alone = [x for _, (x, _, _) in checked.forward.calls if x.shape == p.x.shape]
    shifts = {
        "dx": [(x - p.x).ravel() for x in alone],
        "dgamma": [gamma - p.gamma for _, (_, gamma, _) in checked.forward.calls],
        "dbeta": [beta - p.beta for _, (_, _, beta) in checked.forward.calls],
    }
    moved = {name: _without_traces(moves) for name, moves in shifts.items()}
    return {name: moves for name, moves in moved.items() if moves or name != "dx"}


def _without_traces(moves: list[Array]) -> list[Array]:
    """The moves without those of the last bits, which rounding leaves in an input."""
    sizes = [float(np.linalg.norm(move)) for move in moves]
    least = 1e-6 * max(sizes, default=0.0)
    return [move for move, size in zip(moves, sizes, strict=True) if size > least]


def _check_noticed(
    submission: Submission, checked: Checked, p: Problem, wrong: str, low: float
) -> None:
    """The error of the wrong gradient is large. Those of the right ones are for other checks."""
    error = gradient_errors(submission, checked, p)[wrong]
    expect.that(error > low, f"a wrong {wrong} passes with an error of {error:.3g}")


def _errors_of_scaled(submission: Submission, rng: Rng, by: float, want: float) -> None:
    """Each gradient in turn is wrong by this factor: its error is known, whatever the step is."""
    p = problem(rng, (2, 3, 5))
    for place, name in enumerate(NAMES):
        error = gradient_errors(submission, _linear(partial(scaled, place, by)), p)[name]
        good = abs(error - want) < 1e-3
        expect.that(good, f"{name} times {by} is off by {want}, not by {error:.3g}")


def _errors_of_threes(submission: Submission, rng: Rng) -> None:
    """With dy = 3 and gradients half as long again each error is 1/3; ones give 7/9 and 1/2.

    All elements of a gradient are equal. Of an odd number of random signs no sum is 0, so that no
    choice of directions loses the slope.
    """
    p = problem(rng, (1, 3, 7))
    checked = _linear(lambda grads: (1.5 * grads[0], 1.5 * grads[1], 1.5 * grads[2]))
    p = p._replace(dy=np.full_like(p.dy, 3.0))
    for name, error in gradient_errors(submission, checked, p).items():
        good = abs(error - 1 / 3) < 1e-3
        expect.that(good, f"{name} is half as long again, not off by {error:.3g}")


def _linear(spoil: Spoil = lambda grads: grads) -> Checked:
    """A forward pass that is linear in each input, and its gradients; `spoil` makes them wrong."""

    def run_forward(x: Array, gamma: Array, beta: Array) -> tuple[Array, tuple[Array]]:
        return 2.0 * x + gamma + beta, (x,)

    def run_backward(dy: Array, _: tuple[Array]) -> Grads:
        return spoil((2.0 * dy, dy.sum((0, 1)), dy.sum((0, 1))))

    return Checked(Stub(run_forward), Stub(run_backward))


def _thrice(x: Array, gamma: Array, beta: Array) -> tuple[Array, tuple[Array, Array]]:
    return 3.0 * oracle.layer_norm(x, gamma, beta), (x, gamma)


def _one_element_wrong(place: int, element: int, grads: Grads) -> Grads:
    wrong: list[Array] = [np.array(gradient) for gradient in grads]
    wrong[place].flat[element] += np.linalg.norm(wrong[place])
    return wrong[0], wrong[1], wrong[2]


@trap(
    catches="when forward raises in the middle of the check, x stays shifted",
    severity="minor",
    story="The step is added in place and taken back after the call, but not in a finally.",
    mutant=edit(
        _ASKED,
        "        before = inputs[place].copy()\n"
        "        inputs[place][...] = moved[place]\n"
        "        answer = forward(*inputs)[0]\n"
        "        inputs[place][...] = before\n"
        "        return answer\n",
    ),
    seen="an answer of another author",
)
def check_leaves_x_shifted(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 5))
    checked = passes()
    right, calls = checked.forward.functions[""], []

    def failing(*args: Array) -> object:
        calls.append(args)
        if len(calls) == 3:
            raise ValueError("this forward pass fails")
        return right(*args)

    sent = (p.x, p.gamma, p.beta, p.dy)
    try:
        _, after = submission.observe("gradient_check", Stub(failing), checked.backward, *sent)
    except SubmissionRaised as raised:
        after = raised.left
    for name, left, original in zip(("x", "gamma", "beta", "dy"), after[2:], sent, strict=True):
        expect.equal(left, original, f"{name} after a check in which forward raised")


@trap(
    catches="gradient_check reports errors under each other's names",
    severity="major",
    story="The names stand in another order than the inputs.",
    mutant=edit('("dx", "dgamma", "dbeta")', '("dx", "dbeta", "dgamma")'),
    also=[
        edit('("dx", "dgamma", "dbeta")', names)
        for names in ('("dgamma", "dx", "dbeta")', '("dgamma", "dbeta", "dx")')
    ],
    control=right_passes,
)
def check_names_exchanged(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    for place, name in enumerate(NAMES):
        spoiled = passes(partial(scaled, place, 1.5))
        check_errors(gradient_errors(submission, spoiled, p), name, low=0.2)


@trap(
    catches="gradient_check answers the largest error alone, or errors without their names, or "
    "under other ones",
    severity="major",
    story="One number is enough for an assertion; the caller asks for three by name.",
    mutant=edit(_RETURN, "    return max(errors.values())\n"),
    also=[
        edit(_RETURN, f"    return {answer}\n")
        for answer in (
            "tuple(errors.values())",
            "list(errors.values())",
            "dict(zip(('x', 'gamma', 'beta'), errors.values(), strict=True))",
        )
    ],
)
def check_without_names(submission: Submission, rng: Rng) -> None:
    right_passes(submission, rng)


@trap(
    catches="gradient_check answers arrays, or whether all is well, instead of numbers",
    severity="minor",
    story="An error for each direction, or a sum that kept an axis, is no number to compare.",
    mutant=edit(_RETURN, "    return {name: np.array([e]) for name, e in errors.items()}\n"),
    also=[
        edit(_RETURN, f"    return {{name: {answer} for name, e in errors.items()}}\n")
        for answer in ("np.array(e)", "e < 1e-5", "bool(e > 1e-4)")
    ],
)
def check_answers_arrays(submission: Submission, rng: Rng) -> None:
    right_passes(submission, rng)


@trap(
    catches="only the lengths of the analytic and the numerical derivatives are compared: a "
    "gradient in another direction passes",
    severity="major",
    story="The difference of the norms stands for the norm of the difference.",
    mutant=edit(_ERROR, "float(abs(np.linalg.norm(analytic) - np.linalg.norm(numeric)) / scale)"),
    also=[edit(_ERROR, "float(np.linalg.norm(np.abs(analytic) - np.abs(numeric)) / scale)")],
    control=right_passes,
)
def check_of_lengths(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    for place, name in enumerate(NAMES):
        spoiled = passes(partial(scaled, place, -1.0))
        check_errors(gradient_errors(submission, spoiled, p), name, low=1.5)


@trap(
    catches="analytic and numerical derivatives are added where they are to be subtracted, or the "
    "difference quotient has the wrong sign",
    severity="major",
    story="f(x − h) − f(x + h), and every right gradient is off by 2.",
    mutant=edit(_ERROR, _ERROR.replace("analytic - numeric", "analytic + numeric")),
    also=[edit("(shifted(1.0) - shifted(-1.0))", "(shifted(-1.0) - shifted(1.0))")],
)
def check_with_the_wrong_sign(submission: Submission, rng: Rng) -> None:
    check_errors(gradient_errors(submission, _linear(), problem(rng, (2, 3, 6))), None)


@trap(
    catches="the error is divided by the smaller of |a| and |n| instead of the larger",
    severity="minor",
    story="min and max are exchanged; a gradient of zeros is then off by 1e12.",
    mutant=edit(_SCALE, "max(min(np.linalg.norm(analytic), np.linalg.norm(numeric)), 1e-12)"),
)
def check_relative_to_the_smaller(submission: Submission, rng: Rng) -> None:
    _errors_of_scaled(submission, rng, 0.25, 0.75)
    _errors_of_scaled(submission, rng, 4.0, 0.75)


@trap(
    catches="the floor under |a| and |n| is far above 1e-12, and small gradients pass",
    severity="major",
    story="1e-12 becomes 1e-8, or 1e-3, or 1, to be safe from a division by zero.",
    mutant=edit(_SCALE, _SCALE.replace("1e-12", "1e-3")),
    also=[edit(_SCALE, _SCALE.replace("1e-12", floor)) for floor in ("1.0", "1e-6")],
    seen=WRITTEN_BLIND,
    control=right_passes,
)
def check_with_a_high_floor(submission: Submission, rng: Rng) -> None:
    p = problem(rng, (2, 3, 6))
    small = p._replace(dy=p.dy * 1e-10)
    errors = gradient_errors(submission, passes(partial(scaled, 0, 2.0)), small)
    check_errors(errors, "dx", low=0.3)


@trap(
    catches="the backward pass under test does not get what the contract says: the whole answer of "
    "forward in place of its cache, or its arguments exchanged",
    severity="major",
    story="backward(dy, cache) is called as it is written elsewhere.",
    mutant=edit(_GRADIENTS, "gradients = backward(dy, forward(*inputs))"),
    also=[
        edit(_GRADIENTS, "gradients = backward(forward(*inputs)[1], dy)"),
        edit(_GRADIENTS, "gradients = backward(dy, *forward(*inputs)[1])"),
    ],
)
def check_calls_backward_wrongly(submission: Submission, rng: Rng) -> None:
    right_passes(submission, rng)


@trap(
    catches="every direction moves all elements of a row alike, which layer norm does not see: dx "
    "is compared with rounding",
    severity="major",
    story="A step in all of x is the simplest direction, and not a random one.",
    mutant=edit("rng.choice([-1.0, 1.0], value.shape)", "np.ones(value.shape)"),
    also=[
        edit("spread * rng.choice([-1.0, 1.0], value.shape)", "np.ones(value.shape)"),
        edit(
            "rng.choice([-1.0, 1.0], value.shape)",
            "rng.choice([-1.0, 1.0], value.shape[:-1] + (1,)) + np.zeros(value.shape)",
        ),
    ],
)
def check_moves_all_alike(submission: Submission, rng: Rng) -> None:
    right_passes(submission, rng)


@trap(
    catches="every element is moved in proportion to its own size: one that is 0 stays where it "
    "is, and its derivative is not checked",
    severity="major",
    story="A relative step suits weights; a beta of zeros, as it is initialised, does not move.",
    mutant=edit("spread * rng.choice(", "value * rng.choice("),
    also=[
        edit(_DIRECTION, f"{_DIRECTION}\n            direction = direction * {size}")
        for size in ("np.abs(inputs[place])", "(np.abs(inputs[place]) if place else 1.0)")
    ],
    seen=WRITTEN_BLIND,
    control=right_passes,
)
def check_with_a_relative_step(submission: Submission, rng: Rng) -> None:
    """All of beta or of gamma is 0, and all of its gradient is wrong."""
    p = problem(rng, (2, 3, 6))
    zeros = np.zeros_like(p.beta)
    for place, with_zeros in ((2, p._replace(beta=zeros)), (1, p._replace(gamma=zeros))):
        spoiled = passes(partial(scaled, place, 2.0))
        _check_noticed(submission, spoiled, with_zeros, NAMES[place], low=1e-4)
