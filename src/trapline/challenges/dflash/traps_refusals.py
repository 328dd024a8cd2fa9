"""Bad input that is accepted, one kind in each trap."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.dflash.situations import VOCABULARY, WRITTEN, refused
from trapline.challenges.dflash.solution_lines import RANKED

_MASK_LENGTH = '    prefix_len = whole(prefix_len, "prefix_len", least=0)\n    count'
_DRAFT = "    if np.isnan(log_q).any() or np.isposinf(log_q).any():\n"
_LAWS = "    if not (probs >= 0.0).all() or not (probs.max(axis=1) > 0.0).all():\n"
_NUMBERS = "    if not ((uniforms >= 0.0) & (uniforms < 1.0)).all():\n"


def draft(
    rng: np.random.Generator, spoilt: float | None = None, row: int | None = None
) -> np.ndarray:
    """A draft of two rows, one of its values spoilt, in this row or in any."""
    log_q = -rng.integers(1, 64, (2, VOCABULARY)) / 8.0
    if spoilt is not None:
        row = int(rng.integers(2)) if row is None else row
        log_q[row, int(rng.integers(VOCABULARY))] = spoilt
    return np.asarray(log_q)


# --- build_tree -----------------------------------------------------------------------------------


@trap(
    catches="NaN in the draft is accepted",
    severity="minor",
    story="NaN compares false with everything and can come out as the heaviest.",
    mutant=edit(_DRAFT, "    if np.isposinf(log_q).any():\n"),
    also=[edit(_DRAFT, "    if np.isnan(log_q[:1]).any() or np.isposinf(log_q).any():\n")],
    dimension="robustness",
)
def nan_in_the_draft_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for row in range(2):
        refused(submission, "build_tree", draft(rng, np.nan, row), 3)


@trap(
    catches="+inf in the draft is accepted",
    severity="minor",
    story="A test for NaN alone lets it through.",
    mutant=edit(_DRAFT, "    if np.isnan(log_q).any():\n"),
    also=[edit(_DRAFT, "    if np.isnan(log_q).any() or np.isposinf(log_q[:1]).any():\n")],
    dimension="robustness",
)
def infinity_in_the_draft_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for row in range(2):
        refused(submission, "build_tree", draft(rng, np.inf, row), 3)


@trap(
    catches="an integer draft is accepted",
    severity="minor",
    story="Log-probabilities that were rounded to integers have lost their meaning.",
    mutant=edit('    if log_q.dtype.kind != "f":\n', '    if log_q.dtype.kind not in "fiu":\n'),
    dimension="robustness",
)
def integer_draft_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "build_tree", -rng.integers(1, 9, (2, VOCABULARY)), 3)


@trap(
    catches="a complex draft is accepted",
    severity="minor",
    story="NumPy orders and casts complex numbers with no more than a warning.",
    mutant=edit("    log_q = np.asarray(log_q)\n", "    log_q = np.real(np.asarray(log_q))\n"),
    dimension="robustness",
)
def complex_draft_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "build_tree", draft(rng).astype(np.complex128), 3)


@trap(
    catches="a negative budget is accepted by build_tree",
    severity="minor",
    story="A slice with a negative end silently means something else.",
    mutant=edit(
        '    budget = whole(budget, "budget", least=0)\n' + RANKED,
        '    budget = whole(budget, "budget", least=-99)\n' + RANKED,
    ),
    dimension="robustness",
)
def negative_budget_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "build_tree", draft(rng), -1 - int(rng.integers(3)))


@trap(
    catches="a fractional budget is accepted by build_tree",
    severity="minor",
    story="int(2.5) is 2 without a word.",
    mutant=edit(
        '    budget = whole(budget, "budget", least=0)\n' + RANKED,
        '    budget = whole(int(budget), "budget", least=0)\n' + RANKED,
    ),
    dimension="robustness",
)
def fractional_budget_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "build_tree", draft(rng), 2.5)


# --- trees ----------------------------------------------------------------------------------------

_FAMILY = np.array([-1, -1, 0, 0, 2, 1])


def with_parent(submission: Submission, place: int, parent: int) -> None:
    parents = _FAMILY.copy()
    parents[place] = parent
    refused(submission, "tree_mask", parents, 2)
    refused(submission, "verify_tree", np.arange(6), parents, np.arange(7))


@trap(
    catches="a node that names itself as its parent is accepted",
    severity="minor",
    story="The bound is off by one: ≤ for <.",
    mutant=edit("        if not -1 <= parent < node:\n", "        if not -1 <= parent <= node:\n"),
    dimension="robustness",
    seen=WRITTEN,
)
def own_parent_accepted(submission: Submission, rng: np.random.Generator) -> None:
    place = int(rng.integers(1, 6))
    with_parent(submission, place, place)


@trap(
    catches="a parent that comes after its child is accepted",
    severity="minor",
    story="Only the range of parents is checked, not their order.",
    mutant=edit(
        "        if not -1 <= parent < node:\n",
        "        if not -1 <= parent < len(values) or parent == node:\n",
    ),
    dimension="robustness",
)
def later_parent_accepted(submission: Submission, rng: np.random.Generator) -> None:
    place = int(rng.integers(1, 5))
    with_parent(submission, place, place + 1)


@trap(
    catches="a parent below −1 is accepted",
    severity="minor",
    story="A negative index other than −1 silently reads from the end of the array.",
    mutant=edit("        if not -1 <= parent < node:\n", "        if parent >= node:\n"),
    dimension="robustness",
)
def parent_below_the_root_accepted(submission: Submission, rng: np.random.Generator) -> None:
    with_parent(submission, int(rng.integers(1, 6)), -2)


@trap(
    catches="parents of floating-point numbers are accepted",
    severity="minor",
    story="They index nothing, and int() hides it.",
    mutant=edit(
        '    if array.size and array.dtype.kind not in "iu":\n',
        '    array = array.astype(np.int64)\n    if array.dtype.kind not in "iu":\n',
    ),
    dimension="robustness",
)
def floating_parents_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "tree_mask", _FAMILY.astype(np.float64), int(rng.integers(4)))


@trap(
    catches="a negative prefix_len is accepted by tree_mask",
    severity="minor",
    story="A slice with a negative end silently means something else.",
    mutant=edit(_MASK_LENGTH, "    prefix_len = max(0, int(prefix_len))\n    count"),
    dimension="robustness",
)
def negative_prefix_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "tree_mask", _FAMILY, -1 - int(rng.integers(2)))


@trap(
    catches="choices without a row for the root are accepted",
    severity="minor",
    story="N rows for N nodes is the sign of positional logits.",
    mutant=edit(
        '    choices = checked_ints(choices, len(parents) + 1, "choices")\n',
        '    choices = checked_ints(choices, None, "choices")\n'
        "    choices += [0] * (len(parents) + 1 - len(choices))\n",
    ),
    dimension="robustness",
)
def too_few_choices_accepted(submission: Submission, rng: np.random.Generator) -> None:
    choices = rng.integers(0, VOCABULARY, 3)
    choices[0] = 0
    refused(submission, "verify_tree", np.array([5, 6, 5]), np.array([-1, -1, 1]), choices)


@trap(
    catches="more choices than rows are accepted",
    severity="minor",
    story="What is left over is never read.",
    mutant=edit(
        '    choices = checked_ints(choices, len(parents) + 1, "choices")\n',
        '    choices = checked_ints(choices[: len(parents) + 1], len(parents) + 1, "choices")\n',
    ),
    seen=WRITTEN,
    dimension="robustness",
)
def too_many_choices_accepted(submission: Submission, rng: np.random.Generator) -> None:
    choices = rng.integers(0, VOCABULARY, 5)
    choices[0] = 0
    refused(submission, "verify_tree", np.array([5, 6, 5]), np.array([-1, -1, 1]), choices)


@trap(
    catches="tokens and parents of different lengths are accepted",
    severity="minor",
    story="zip() ends with the shorter one.",
    mutant=edits(
        (
            '    tokens = checked_ints(tokens, len(parents), "tokens")\n',
            '    tokens = checked_ints(tokens, None, "tokens")\n',
        ),
        (
            "enumerate(zip(parents, tokens, strict=True))",
            "enumerate(zip(parents, tokens, strict=False))",
        ),
    ),
    dimension="robustness",
)
def uneven_tree_accepted(submission: Submission, rng: np.random.Generator) -> None:
    choices = rng.integers(0, 5, 4)
    refused(submission, "verify_tree", np.array([5, 6]), np.array([-1, -1, 1]), choices)


# --- verify_sampled -------------------------------------------------------------------------------


def sampled(submission: Submission, law: np.ndarray, numbers: np.ndarray) -> None:
    refused(submission, "verify_sampled", np.array([1]), np.array([-1]), law, numbers)


def spoilt_law(rng: np.random.Generator, value: float) -> np.ndarray:
    law = np.full((2, 2), 0.5)
    law[int(rng.integers(2)), int(rng.integers(2))] = value
    return law


def spoilt_numbers(rng: np.random.Generator, value: float) -> np.ndarray:
    numbers = np.array([0.25, 0.25])
    numbers[int(rng.integers(2))] = value
    return numbers


FAIR_LAW, FAIR_NUMBERS = np.full((2, 2), 0.5), np.array([0.25, 0.25])


@trap(
    catches="negative probabilities are accepted",
    severity="minor",
    story="The cumulative sum is no longer monotonic.",
    mutant=edit(_LAWS, "    if np.isnan(probs).any() or not (probs.max(axis=1) > 0.0).all():\n"),
    dimension="robustness",
)
def negative_probability_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, spoilt_law(rng, -0.25), FAIR_NUMBERS)


@trap(
    catches="NaN among the probabilities is accepted",
    severity="minor",
    story="`(probs < 0).any()` is false for NaN.",
    mutant=edit(
        _LAWS, "    if (probs < 0.0).any() or not (np.nanmax(probs, axis=1) > 0.0).all():\n"
    ),
    dimension="robustness",
)
def nan_probability_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, spoilt_law(rng, np.nan), FAIR_NUMBERS)


@trap(
    catches="a law without any possible token is accepted",
    severity="minor",
    story="No token can be picked from a row of zeros.",
    mutant=edits(
        (_LAWS, "    if not (probs >= 0.0).all():\n"),
        (
            "    return int(np.flatnonzero(row > 0.0)[-1])\n",
            "    return int(np.flatnonzero(row >= row.max())[-1])\n",
        ),
    ),
    seen=WRITTEN,
    dimension="robustness",
)
def impossible_law_accepted(submission: Submission, rng: np.random.Generator) -> None:
    law = np.full((2, 2), 0.5)
    law[int(rng.integers(2))] = 0.0
    sampled(submission, law, FAIR_NUMBERS)


@trap(
    catches="integers are accepted in place of uniform numbers",
    severity="minor",
    story="An array of zeros is made without a dtype, and every pick is the first possible token.",
    mutant=edit(
        '    if uniforms.dtype.kind != "f":\n', '    if uniforms.dtype.kind not in "fiu":\n'
    ),
    dimension="robustness",
)
def integer_numbers_accepted(submission: Submission, rng: np.random.Generator) -> None:
    law = FAIR_LAW[:, rng.permutation(2)]
    sampled(submission, law, np.zeros(2, np.int64))


@trap(
    catches="a number of 1 or more is accepted",
    severity="minor",
    story="A number of exactly 1 can come from rounding to float32 and exceeds every sum.",
    mutant=edit(_NUMBERS, "    if not (uniforms >= 0.0).all():\n"),
    dimension="robustness",
)
def number_of_one_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, FAIR_LAW, spoilt_numbers(rng, 1.0))


@trap(
    catches="negative numbers are accepted in place of uniform ones",
    severity="minor",
    story="Only the upper bound is checked.",
    mutant=edit(_NUMBERS, "    if not (uniforms < 1.0).all():\n"),
    dimension="robustness",
)
def negative_number_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, FAIR_LAW, spoilt_numbers(rng, -0.125))


@trap(
    catches="NaN is accepted in place of a uniform number",
    severity="minor",
    story="`(u < 0) | (u >= 1)` is false for NaN.",
    mutant=edit(_NUMBERS, "    if ((uniforms < 0.0) | (uniforms >= 1.0)).any():\n"),
    dimension="robustness",
)
def nan_number_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, FAIR_LAW, spoilt_numbers(rng, np.nan))


@trap(
    catches="integer probabilities are accepted",
    severity="minor",
    story="Counts or a mask in place of a law.",
    mutant=edit('    if probs.dtype.kind != "f":\n', '    if probs.dtype.kind not in "fiu":\n'),
    dimension="robustness",
)
def integer_laws_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, rng.integers(1, 3, (2, 2)), FAIR_NUMBERS)


@trap(
    catches="complex probabilities are accepted",
    severity="minor",
    story="NumPy orders and casts complex numbers with no more than a warning.",
    mutant=edit('    if probs.dtype.kind != "f":\n', '    if probs.dtype.kind not in "fc":\n'),
    dimension="robustness",
)
def complex_laws_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, spoilt_law(rng, 0.5).astype(np.complex128), FAIR_NUMBERS)


@trap(
    catches="fewer numbers than rows are accepted",
    severity="minor",
    story="Rows that are never reached seem to need no number.",
    mutant=edits(
        ("    if uniforms.shape != (rows,):\n", "    if uniforms.ndim != 1:\n"),
        (
            "    return uniforms.tolist()\n",
            "    return (uniforms.tolist() + [0.0] * rows)[:rows]\n",
        ),
    ),
    dimension="robustness",
)
def too_few_numbers_accepted(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, FAIR_LAW, rng.integers(0, 4, 1) / 8)


# --- compact --------------------------------------------------------------------------------------


@trap(
    catches="a negative node in a path is taken from the prefix or the end of the cache",
    severity="minor",
    story="A negative index is valid Python.",
    mutant=edit('"a node of the path", least=0', '"a node of the path", least=-9'),
    dimension="robustness",
    seen=WRITTEN,
)
def negative_node_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "compact", rng.standard_normal((2, 6, 2)), 2, [-1])


@trap(
    catches="a path beyond the cache is cut or wrapped instead of refused",
    severity="minor",
    story="Clipping an index hides that it is wrong.",
    mutant=edit(
        "    if max(rows) >= kv.shape[-2]:\n",
        "    rows = [min(row, kv.shape[-2] - 1) for row in rows]\n"
        "    if max(rows) >= kv.shape[-2]:\n",
    ),
    dimension="robustness",
)
def node_beyond_the_cache_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "compact", rng.standard_normal((2, 6, 2)), 2, [0, 3])


@trap(
    catches="a cache that is shorter than prefix and root is accepted",
    severity="minor",
    story="A slice that ends behind the array is silently shorter.",
    mutant=edit(
        "    if max(rows) >= kv.shape[-2]:\n",
        "    rows = [r for r in rows if r < kv.shape[-2] or r > prefix_len]\n"
        "    if max(rows, default=0) >= kv.shape[-2]:\n",
    ),
    seen=WRITTEN,
    dimension="robustness",
)
def short_cache_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "compact", rng.standard_normal((2, 6, 2)), 6, [])


# --- generate -------------------------------------------------------------------------------------


def generating(
    submission: Submission,
    answer: Callable[[int], np.ndarray] = lambda rows: np.full((rows, VOCABULARY), -2.0),
    prompt: tuple[int, ...] = (1, 2),
    **changes: Any,
) -> None:
    """`generate` refuses to work with these answers of the target, prompt and settings."""
    drafter = Stub(block=lambda prefix: np.full((1, VOCABULARY), -2.0))
    target = Stub(tree_log_probs=lambda prefix, tokens, parents: answer(len(tokens) + 1))
    settings = {"max_new_tokens": 3, "eos_id": 5, "budget": 2, **changes}
    refused(submission, "generate", target, drafter, list(prompt), **settings)


@trap(
    catches="an empty prompt is accepted although there is no root",
    severity="minor",
    story="Indexing an empty prefix fails later, with an unrelated error.",
    mutant=edit("    if not prefix:\n", "    if prefix is None:\n"),
    dimension="robustness",
)
def rootless_prompt_accepted(submission: Submission, rng: np.random.Generator) -> None:
    generating(submission, prompt=(), eos_id=int(rng.integers(VOCABULARY)))


@trap(
    catches="NaN in the target's answer goes unnoticed",
    severity="major",
    story="argmax returns the position of a NaN.",
    mutant=edit("    if np.isnan(log_probs).any():\n", "    if rows < 0:\n"),
    dimension="robustness",
)
def nan_of_the_target_accepted(submission: Submission, rng: np.random.Generator) -> None:
    place = int(rng.integers(VOCABULARY))

    def answer(rows: int) -> np.ndarray:
        values = np.full((rows, VOCABULARY), -2.0)
        values[:, place] = np.nan
        return values

    generating(submission, answer)


@trap(
    catches="only some rows of the target's answer are searched for NaN: the root's, or those that "
    "are read",
    severity="minor",
    story="The prompt refuses NaN anywhere in the answer.",
    mutant=edit(
        "    if np.isnan(log_probs).any():\n",
        "    if np.isnan(log_probs[:-1]).any() or rows < 0:\n",
    ),
    also=[
        edit(
            "    if np.isnan(log_probs).any():\n",
            "    if np.isnan(log_probs[0]).any() or rows < 0:\n",
        )
    ],
    seen=WRITTEN,
    dimension="robustness",
)
def nan_of_an_unread_row_accepted(submission: Submission, rng: np.random.Generator) -> None:
    place = int(rng.integers(1, VOCABULARY))

    def answer(rows: int) -> np.ndarray:
        values = np.full((rows, VOCABULARY), -2.0)
        values[-1, place] = np.nan
        return values

    generating(submission, answer)


@trap(
    catches="an answer of the target with fewer rows than N + 1 goes unnoticed",
    severity="major",
    story="The row for the root is the one that is missing.",
    mutant=edit(
        "    if log_probs.ndim != 2 or log_probs.shape[0] != rows:\n",
        "    log_probs = np.concatenate([log_probs, log_probs[-1:]])[:rows]\n"
        "    if log_probs.ndim != 2:\n",
    ),
    dimension="robustness",
)
def too_few_rows_of_the_target_accepted(submission: Submission, rng: np.random.Generator) -> None:
    value = -float(rng.integers(1, 9))
    generating(submission, lambda rows: np.full((rows - 1, VOCABULARY), value))


@trap(
    catches="an answer of the target with more rows than N + 1 goes unnoticed",
    severity="minor",
    story="What is left over is never read.",
    mutant=edit(
        "    if log_probs.ndim != 2 or log_probs.shape[0] != rows:\n",
        "    log_probs = log_probs[:rows]\n"
        "    if log_probs.ndim != 2 or log_probs.shape[0] != rows:\n",
    ),
    dimension="robustness",
)
def too_many_rows_of_the_target_accepted(submission: Submission, rng: np.random.Generator) -> None:
    value = -float(rng.integers(1, 9))
    generating(submission, lambda rows: np.full((rows + 1, VOCABULARY), value))


_WIDTH = "    if log_probs.shape[1] != vocabulary:\n"


@trap(
    catches="an answer of the target for fewer or more tokens than the draft's V goes unnoticed",
    severity="minor",
    story="Only the rows are counted; the target of another tokenizer then picks other words.",
    mutant=edit(_WIDTH, "    if vocabulary < 0:\n"),
    also=[edit(_WIDTH, _WIDTH.replace("!=", sign)) for sign in "<>"],
    dimension="robustness",
)
def width_of_the_target_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    value = -float(rng.integers(1, 9))
    generating(submission, lambda rows: np.full((rows, VOCABULARY - 1), value))
    generating(submission, lambda rows: np.full((rows, VOCABULARY + 1), value))


@trap(
    catches="integer or complex answers of the target are accepted",
    severity="minor",
    story="Their argmax exists, but they are not log-probabilities.",
    mutant=edit(
        '    if log_probs.dtype.kind != "f":\n', '    if log_probs.dtype.kind not in "fiuc":\n'
    ),
    dimension="robustness",
)
def integers_of_the_target_accepted(submission: Submission, rng: np.random.Generator) -> None:
    value = -int(rng.integers(1, 9))
    generating(submission, lambda rows: np.full((rows, VOCABULARY), value))


@trap(
    catches="a negative max_new_tokens is accepted",
    severity="minor",
    story="The loop ends at once, and nothing is said.",
    mutant=edit('"max_new_tokens", least=0', '"max_new_tokens", least=-99'),
    dimension="robustness",
)
def negative_limit_accepted(submission: Submission, rng: np.random.Generator) -> None:
    generating(submission, max_new_tokens=-1 - int(rng.integers(3)))


@trap(
    catches="a negative budget is accepted by generate",
    severity="minor",
    story="With nothing to generate the tree is never built, and the budget never checked.",
    mutant=edit(
        '    budget = whole(budget, "budget", least=0)\n    if not prefix:\n',
        '    budget = max(0, whole(budget, "budget", least=-99))\n    if not prefix:\n',
    ),
    dimension="robustness",
)
def negative_budget_of_generate_accepted(submission: Submission, rng: np.random.Generator) -> None:
    generating(submission, budget=-1 - int(rng.integers(3)))
