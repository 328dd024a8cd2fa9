"""Valid input that is refused, or fails, at the bounds: the least, the last, the only one."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    cache,
    distinct,
    float_type,
    story_of,
)
from trapline.challenges.dflash.solution_lines import RANKED
from trapline.challenges.dflash.traps_committing import same_rows
from trapline.challenges.dflash.traps_generating import told
from trapline.challenges.dflash.traps_mask import same_mask
from trapline.challenges.dflash.traps_sampling import ALMOST_ONE, TENTHS, sampled
from trapline.challenges.dflash.traps_tree import two_good_roots
from trapline.gold.tree_decoding import oracle

# Ends of the gold solution's checks, and what stands behind them.
_DRAFT = "    return log_q.astype(np.float64)\n"
_LAWS = "    return probs.astype(np.float64)\n"
_NUMBERS = "    return uniforms.tolist()\n"
_INTS = "    return array.tolist()\n"
_ANSWER = "    return log_probs.argmax(axis=1)\n"
_CHOICES = '    choices = checked_ints(choices, len(parents) + 1, "choices")\n'
_COUNT = "    count = len(parents)\n"
_FITS = "    if max(rows) >= kv.shape[-2]:\n"
_KEPT = "    return kv[..., rows, :]\n"
_ROOTLESS = "    if not prefix:\n"
_SAMPLED = "    probs = checked_probs(probs)\n"


def _always(values: np.ndarray) -> Callable[[table.Prefix], np.ndarray]:
    """A model that answers this after every prefix."""
    return lambda _: values


def _no(condition: str) -> str:
    return f"    if {condition}:\n        raise ValueError('refused')\n"


def _refuses(condition: str, before: str) -> Mutant:
    return insert_before(before, _no(condition))


# --- build_tree -----------------------------------------------------------------------------------


def _budget_of_two(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 2, (tokens[:2], parents[:2]))
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=5, budget=2)


@trap(
    catches="a budget of 1 gives an empty tree or is refused",
    severity="major",
    story="The smallest tree has one node, the likeliest token; a case for a budget of 0 takes it "
    "in.",
    mutant=edit(RANKED, "    budget = 0 if budget == 1 else budget\n" + RANKED),
    also=[
        edit(RANKED, "    if budget == 1:\n        raise ValueError('no tree')\n" + RANKED),
        _refuses("budget == 1", _ROOTLESS),
        insert_before(_ROOTLESS, "    budget = 0 if budget == 1 else budget\n"),
    ],
    control=_budget_of_two,
)
def budget_of_one(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 1, (tokens[:1], parents[:1]))
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=5, budget=1)


@trap(
    catches="a budget far above the number of possible prefixes fails or is refused",
    severity="minor",
    story="An array of `budget` places is made before it is known how many prefixes there are.",
    mutant=edit(RANKED, "    _places = np.ones(budget)\n" + RANKED),
    also=[edit(RANKED, _no("budget > 2**31 - 1") + RANKED)],
    control=lambda submission, rng: _all_prefixes(submission, rng, 50),
)
def huge_budget_refused(submission: Submission, rng: np.random.Generator) -> None:
    _all_prefixes(submission, rng, 2**40)


def _all_prefixes(submission: Submission, rng: np.random.Generator, budget: int) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, budget, (tokens, parents))


def _two_rows(submission: Submission, rng: np.random.Generator) -> None:
    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, log_q, 3, (tokens[:3], parents[:3]))


@trap(
    catches="a draft without rows (L = 0), or with a single one, is refused or fails",
    severity="major",
    story="The prompt allows any L; a drafter that proposes nothing leaves plain decoding.",
    mutant=_refuses("not len(log_q)", _DRAFT),
    also=[
        _refuses("len(log_q) < 2", _DRAFT),
        _refuses("len(log_q) == 1", _DRAFT),
        _refuses("log_q.max() > 0.0", _DRAFT),
    ],
    control=_two_rows,
)
def short_draft_refused(submission: Submission, rng: np.random.Generator) -> None:
    kind = float_type(rng)
    a, b = distinct(rng, 2)
    log_q = table.log_q_of([{a: -0.5, b: -1.0}], VOCABULARY, kind)
    table.same_tree(submission, log_q, 2, ([a, b], [-1, -1]))
    table.same_tree(submission, log_q[:0], 2, ([], []))


def _two_tokens(submission: Submission, rng: np.random.Generator) -> None:
    _small_vocabulary(submission, rng, 2)


@trap(
    catches="a vocabulary of one token (V = 1) is refused or fails",
    severity="minor",
    story="More than one column is asked for, or an axis of length 1 is squeezed away.",
    mutant=edits(
        (_DRAFT, _no("log_q.shape[1] < 2") + _DRAFT),
        (_LAWS, _no("probs.shape[1] < 2") + _LAWS),
    ),
    also=[
        _refuses("log_q.shape[1] < 2", _DRAFT),
        _refuses("probs.shape[1] < 2", _LAWS),
        _refuses("vocabulary < 2", _ANSWER),
    ],
    control=_two_tokens,
)
def only_token_refused(submission: Submission, rng: np.random.Generator) -> None:
    _small_vocabulary(submission, rng, 1)


def _small_vocabulary(submission: Submission, rng: np.random.Generator, size: int) -> None:
    kind = float_type(rng)
    log_q = np.full((2, size), -3.0, dtype=kind)
    log_q[:, 0] = -0.5
    table.same_tree(submission, log_q, 2, ([0, 0], [-1, 0]))
    laws = np.eye(1, size, dtype=kind).repeat(2, axis=0)
    sampled(submission, [0], [-1], laws.tolist(), [0.25, 0.5], ([0], 0), kind)
    # The only token is also the end: it is said, and ends the output.
    settings: dict[str, Any] = {"max_new_tokens": 1, "eos_id": size - 1, "budget": 2}
    table.run(submission, _always(log_q[0]), _always(log_q), (0,), **settings)


def _almost_certain(submission: Submission, rng: np.random.Generator) -> None:
    _certain(submission, rng, 0.75)


@trap(
    catches="a token of probability 1 is refused in a draft, in a law or in the target's answer",
    severity="major",
    story="Less than 1 is asked for; a certain token has log-probability 0.",
    mutant=_refuses("(log_q >= 0.0).any()", _DRAFT),
    also=[
        _refuses("(probs >= 1.0).any()", _LAWS),
        _refuses("(log_probs >= 0.0).any()", _ANSWER),
        edits(
            (_DRAFT, _no("(log_q >= 0.0).any()") + _DRAFT),
            (_LAWS, _no("(probs >= 1.0).any()") + _LAWS),
        ),
    ],
    control=_almost_certain,
)
def certain_token_refused(submission: Submission, rng: np.random.Generator) -> None:
    _certain(submission, rng, 1.0)


def _certain(submission: Submission, rng: np.random.Generator, probability: float) -> None:
    kind = float_type(rng)
    a, eos = distinct(rng, 2)
    law = np.full(VOCABULARY, (1.0 - probability) / (VOCABULARY - 1), dtype=kind)
    law[a] = probability
    draft = table.log_q_of([{a: float(np.log(probability))}], VOCABULARY, kind)
    table.same_tree(submission, draft, 1, ([a], [-1]))
    sampled(submission, [], [], [law.tolist()], [0.5], ([], a), kind)
    settings: dict[str, Any] = {"max_new_tokens": 3, "eos_id": eos, "budget": 1}
    table.run(submission, _always(draft[0]), _always(draft), (a,), **settings)


def _sums(submission: Submission, rng: np.random.Generator, total: float) -> None:
    """A draft of two likely tokens a row, whose probabilities have this sum."""
    a, b = distinct(rng, 2)
    row = {a: float(np.log(total * 0.75)), b: float(np.log(total * 0.25))}
    log_q = table.log_q_of([row], VOCABULARY, np.float64)
    table.same_tree(submission, log_q, 2, ([a, b], [-1, -1]))


_TOTAL = "np.exp(log_q.astype(np.float64)).sum(axis=1)"


@trap(
    catches="a draft whose probabilities do not sum to 1 is refused",
    severity="major",
    story="A law is asked for; the prompt says that rows need not sum to 1.",
    mutant=_refuses(f"(abs({_TOTAL} - 1.0) > 0.1).any()", _DRAFT),
    also=[
        _refuses(f"({_TOTAL} < 0.9).any()", _DRAFT),
        _refuses(f"({_TOTAL} > 1.1).any()", _DRAFT),
    ],
    control=lambda submission, rng: _sums(submission, rng, 1.0),
)
def draft_without_a_sum_of_one_refused(submission: Submission, rng: np.random.Generator) -> None:
    for total in (0.5, 1.25):
        _sums(submission, rng, total)


def _possible_rows(submission: Submission, rng: np.random.Generator) -> None:
    _row_below(submission, rng, -40.0)


@trap(
    catches="a draft with a row of which no token is possible is refused",
    severity="minor",
    story="Nothing hangs below the depth before it; only NaN and +inf are bad input.",
    mutant=_refuses("len(log_q) and np.isneginf(log_q.max(axis=1)).any()", _DRAFT),
    also=[_refuses("log_q.size and np.isneginf(log_q.max())", _DRAFT)],
    control=_possible_rows,
)
def impossible_row_refused(submission: Submission, rng: np.random.Generator) -> None:
    _row_below(submission, rng, -np.inf)
    nothing = np.zeros(0, dtype=np.int64)
    log_q = np.full((2, VOCABULARY), -np.inf)
    table.same_tree(submission, log_q, 2, (nothing.tolist(), nothing.tolist()))


def _row_below(submission: Submission, rng: np.random.Generator, value: float) -> None:
    a, b = distinct(rng, 2)
    log_q = table.log_q_of([{a: -0.5, b: -1.0}, {}], VOCABULARY, float_type(rng))
    log_q[1] = value
    table.same_tree(submission, log_q, 2, ([a, b], [-1, -1]))


# --- dtypes and strides ---------------------------------------------------------------------------


_UNLIKE = (
    "    kinds = {np.asarray(probs).dtype.str, np.asarray(uniforms).dtype.str}\n"
    + _no("kinds == {'<f4', '<f8'}")
    + _SAMPLED
)


def _only(kind: str) -> Mutant:
    return edits(
        (_DRAFT, _no(f"log_q.dtype != np.{kind}") + _DRAFT),
        (_LAWS, _no(f"probs.dtype != np.{kind}") + _LAWS),
        (_NUMBERS, _no(f"uniforms.dtype != np.{kind}") + _NUMBERS),
    )


@trap(
    catches="floating-point arrays are refused for their dtype: float32, float64, a mixture of "
    "both, or a float16 cache",
    severity="major",
    story="One dtype is asked for where the prompt takes every floating-point array.",
    mutant=_only("float64"),
    also=[
        _only("float32"),
        *(
            _refuses(f"{name}.dtype != np.{kind}", line)
            for name, line in (("log_q", _DRAFT), ("probs", _LAWS), ("uniforms", _NUMBERS))
            for kind in ("float64", "float32")
        ),
        _refuses("log_probs.dtype != np.float64", _ANSWER),
        edit(_SAMPLED, _UNLIKE),
        _refuses("kv.dtype == np.float16", _KEPT),
        edit(_SAMPLED, _UNLIKE.replace("ValueError", "TypeError")),
    ],
)
def float_type_refused(submission: Submission, rng: np.random.Generator) -> None:
    kinds = np.float32, np.float64
    for kind in kinds:
        a, eos = distinct(rng, 2)
        log_q = table.log_q_of([{a: -0.5}], VOCABULARY, kind)
        table.same_tree(submission, log_q, 1, ([a], [-1]))
        settings: dict[str, Any] = {"max_new_tokens": 2, "eos_id": eos, "budget": 1, "dtype": kind}
        table.run(submission, _always(log_q[0]), _always(log_q), (a,), **settings)
        for other in kinds:
            law, number = np.array([[0.25, 0.75]], dtype=kind), np.array([0.5], dtype=other)
            empty = np.zeros(0, dtype=np.int64)
            table.same_verdict(submission.verify_sampled(empty, empty, law, number), ([], 1))
    for narrow in (*kinds, np.float16):
        same_rows(submission, rng.standard_normal((2, 5, 2)).astype(narrow), 1, [1])


def _int64(submission: Submission, rng: np.random.Generator) -> None:
    _of_types(submission, rng, (np.int64,), (np.int64,))


@trap(
    catches="integer arrays of another dtype than int64 are refused: int32, int8 or unsigned ones",
    severity="major",
    story="The prompt asks for integers; where they come from, tokens are often int32 or unsigned.",
    mutant=_refuses("array.size and array.dtype != np.int64", _INTS),
    also=[
        _refuses("array.size and array.dtype.itemsize < 4", _INTS),
        _refuses("array.size and array.dtype.kind == 'u'", _INTS),
        _refuses("array.size and array.dtype == np.int32", _INTS),
        edit('array.dtype.kind not in "iu"', "array.dtype not in (np.int64, np.int32)"),
        edit('array.dtype.kind not in "iu"', 'array.dtype.kind != "i"'),
        edit(
            'array.dtype.kind not in "iu"',
            '(array.dtype.kind not in "iu" or array.dtype == np.int32)',
        ),
    ],
    control=_int64,
)
def integer_type_refused(submission: Submission, rng: np.random.Generator) -> None:
    _of_types(submission, rng, (np.int32, np.int8), (np.int32, np.uint8, np.uint64))


def _of_types(
    submission: Submission, rng: np.random.Generator, parents: tuple[Any, ...], ids: tuple[Any, ...]
) -> None:
    a, b, c, x = distinct(rng, 4)
    above = [-1, -1, 1]
    for kind in parents:
        same_mask(submission, np.array(above, dtype=kind), int(rng.integers(1, 4)))
    for kind in ids:
        tree = np.array([a, b, c], dtype=kind), np.array(above, dtype=parents[0])
        choices = np.array([b, x, c, a], dtype=kind)
        table.same_verdict(submission.verify_tree(*tree, choices), ([1, 2], a))


def _contiguous(submission: Submission, rng: np.random.Generator) -> None:
    _of_strides(submission, rng, 1)


_STRIDED = "{0}.size > 1 and not {0}.flags.c_contiguous"


@trap(
    catches="an array that is a view with strides is refused or read wrongly",
    severity="major",
    story="Contiguous memory is asked for; or the memory is read in its own order.",
    mutant=edits(
        *(
            (line, _no(_STRIDED.format(name)) + line)
            for name, line in (
                ("log_q", _DRAFT),
                ("probs", _LAWS),
                ("uniforms", _NUMBERS),
                ("array", _INTS),
                ("kv", _KEPT),
            )
        )
    ),
    also=[
        _refuses(_STRIDED.format("log_q"), _DRAFT),
        _refuses(_STRIDED.format("probs"), _LAWS),
        _refuses(_STRIDED.format("uniforms"), _NUMBERS),
        _refuses(_STRIDED.format("array"), _INTS),
        _refuses(_STRIDED.format("kv"), _KEPT),
        edit(_DRAFT, "    return log_q.ravel(order='K').reshape(log_q.shape).astype(np.float64)\n"),
        edit(_LAWS, "    return probs.ravel(order='K').reshape(probs.shape).astype(np.float64)\n"),
        insert_before(_KEPT, "    kv = kv.ravel(order='K').reshape(kv.shape)\n"),
    ],
    control=_contiguous,
)
def views_refused(submission: Submission, rng: np.random.Generator) -> None:
    _of_strides(submission, rng, 2)


def _of_strides(submission: Submission, rng: np.random.Generator, step: int) -> None:
    """Views of every second element, and transposed ones, unless the step is 1."""

    def spread(values: np.ndarray) -> np.ndarray:
        wide = np.repeat(values, step, axis=-1)[..., ::step]
        return wide if step == 1 or values.ndim == 1 else np.asfortranarray(values)

    log_q, tokens, parents = two_good_roots(rng)
    table.same_tree(submission, spread(log_q), 4, (tokens[:4], parents[:4]))
    a, b, c, x = distinct(rng, 4)
    tree = spread(np.array([a, b, c])), spread(np.array([-1, -1, 1]))
    same_mask(submission, tree[1], 2)
    got = submission.verify_tree(*tree, spread(np.array([b, x, c, a])))
    table.same_verdict(got, ([1, 2], a))
    law = np.full((4, VOCABULARY), 0.0625)
    law[np.arange(4), [b, x, c, a]] += 1.0 - 0.0625 * VOCABULARY
    numbers = np.array([0.5, 0.5, 0.5, 0.5])
    want = [int(np.flatnonzero(np.cumsum(row) > 0.5)[0]) for row in law]
    verdict = oracle.verify_tree([a, b, c], [-1, -1, 1], want)
    got = submission.verify_sampled(*tree, spread(law), spread(numbers))
    table.same_verdict(got, verdict)
    same_rows(submission, spread(cache(rng, 2, 6, 3)), 2, [0, 2])


# --- trees ----------------------------------------------------------------------------------------


def _two_nodes(submission: Submission, rng: np.random.Generator) -> None:
    a, b, x = distinct(rng, 3)
    same_mask(submission, np.array([-1, 0]), 2)
    table.verify(submission, [a, b], [-1, 0], [a, b, x], ([0, 1], x))


@trap(
    catches="a tree of one node is refused or fails",
    severity="major",
    story="An axis of length 1 is squeezed away, and a number is left of the array.",
    mutant=edits(
        (_COUNT, _COUNT + _no("count == 1")),
        (_CHOICES, _CHOICES + _no("len(parents) == 1")),
    ),
    also=[
        insert_after(_COUNT, _no("count == 1")),
        insert_after(_CHOICES, _no("len(parents) == 1")),
        edit("    array = np.asarray(values)\n", "    array = np.squeeze(np.asarray(values))\n"),
    ],
    control=_two_nodes,
)
def only_node_refused(submission: Submission, rng: np.random.Generator) -> None:
    a, x, y = distinct(rng, 3)
    same_mask(submission, np.array([-1]), 2)
    table.verify(submission, [a], [-1], [a, x], ([0], x))
    table.verify(submission, [a], [-1], [x, y], ([], x))


def _different_tokens(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, d, x = distinct(rng, 5)
    table.verify(submission, [a, b, c, d], [-1, -1, 0, 1], [b, x, d, x, a], ([1, 3], a))


@trap(
    catches="a tree in which a token occurs more than once is refused",
    severity="major",
    story="Siblings have different tokens; nodes on other branches or below may have the same.",
    mutant=insert_after(_CHOICES, _no("len({*tokens}) < len(tokens)")),
    control=_different_tokens,
)
def equal_tokens_refused(submission: Submission, rng: np.random.Generator) -> None:
    a, b, c, x = distinct(rng, 4)
    table.verify(submission, [a, b, c, c], [-1, -1, 0, 1], [b, x, c, x, a], ([1, 3], a))
    table.verify(submission, [a, a], [-1, 0], [a, a, x], ([0, 1], x))


# --- verify_sampled -------------------------------------------------------------------------------


def _above_zero(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, [1], [-1], _HALVES, [0.625, 0.125], ([0], 0), float_type(rng))


_HALVES = [[0.5, 0.5], [0.5, 0.5]]


@trap(
    catches="a number of exactly 0 is refused by verify_sampled",
    severity="major",
    story="0 < u < 1 in place of 0 <= u < 1: a generator of random numbers gives 0 once in sixteen "
    "million draws.",
    mutant=edit("((uniforms >= 0.0) &", "((uniforms > 0.0) &"),
    control=_above_zero,
)
def number_zero_refused(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, [1], [-1], _HALVES, [0.625, 0.0], ([0], 0), float_type(rng))


@trap(
    catches="the largest number below 1 is refused by verify_sampled",
    severity="minor",
    story="In float32 it is rounded to 1, or a margin is kept.",
    mutant=edit("& (uniforms < 1.0)", "& (uniforms.astype(np.float32) < 1.0)"),
    also=[edit("& (uniforms < 1.0)", "& (uniforms < 1.0 - 1e-6)")],
    control=_above_zero,
)
def largest_number_refused(submission: Submission, rng: np.random.Generator) -> None:  # noqa: ARG001
    sampled(submission, [1], [-1], _HALVES, [0.625, ALMOST_ONE], ([0], 1))


def _exact_laws(submission: Submission, rng: np.random.Generator) -> None:
    sampled(submission, [], [], [[0.25, 0.75]], [0.5], ([], 1), float_type(rng))


_SUM = "probs.astype(np.float64).sum(axis=1)"


@trap(
    catches="a law whose sum is not exactly 1 because of rounding is refused",
    severity="major",
    story="The sum is compared with 1 without a tolerance, or with one for float64 alone.",
    mutant=_refuses(f"({_SUM} != 1.0).any()", _LAWS),
    also=[
        _refuses(f"(abs({_SUM} - 1.0) > {margin}).any()", _LAWS) for margin in (1e-12, 1e-9, 1e-8)
    ],
    control=_exact_laws,
)
def rounded_law_refused(submission: Submission, rng: np.random.Generator) -> None:
    for kind in (np.float64, np.float32):
        number = float(rng.integers(1, 4)) / 16 + 0.05
        sampled(submission, [], [], [TENTHS], [0.05], ([], 0), kind)
        sampled(submission, [], [], [TENTHS], [number], ([], int(number * 10)), kind)


# --- compact --------------------------------------------------------------------------------------


def _later_nodes(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 2 + 1 + 4, 3), 2, [1, 2])


@trap(
    catches="a path with node 0 is refused by compact",
    severity="major",
    story="More than 0 is asked of a node where at least 0 is meant: the likeliest node of all "
    "cannot be committed.",
    mutant=edit('"a node of the path", least=0', '"a node of the path", least=1'),
    control=_later_nodes,
)
def first_node_refused(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 2 + 1 + 4, 3), 2, [0, 2])


def _one_node_left_out(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3 + 1 + 1, 2), 3, [])


@trap(
    catches="a cache that holds prefix and root alone, because the tree has no nodes, is refused",
    severity="major",
    story="A drafter may propose nothing; the pass then computes the root's row and no other.",
    mutant=edit(_FITS, _FITS.replace("if ", "if kv.shape[-2] == first or ")),
    control=_one_node_left_out,
)
def cache_without_nodes_refused(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 3 + 1, 2), 3, [])
    same_rows(submission, cache(rng, 2, 0 + 1, 2), 0, [])


def _one_before_the_last(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 2 + 1 + 4, 3), 2, [0, 2])


@trap(
    catches="a path with the last node of the cache is refused by compact",
    severity="major",
    story="The bound is off by one: the last row is taken for the end.",
    mutant=edit(_FITS, "    if nodes and max(rows) >= kv.shape[-2] - 1:\n"),
    also=[edit(_FITS, "    if max(rows) >= kv.shape[-2] - 1:\n")],
    control=_one_before_the_last,
)
def last_row_refused(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 2 + 1 + 4, 3), 2, [0, 3])


def _nonempty_axes(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 1, 3, 6, 2), 2, [1])


@trap(
    catches="a cache with an empty leading axis is refused or fails",
    severity="minor",
    story="All leading axes are reshaped to one of length -1, which nothing determines.",
    mutant=insert_before(_KEPT, "    kv.reshape(-1, *kv.shape[-2:])\n" + _no("not kv.size")),
    control=_nonempty_axes,
)
def empty_leading_axis_refused(submission: Submission, rng: np.random.Generator) -> None:
    same_rows(submission, cache(rng, 2, 0, 3, 6, 2), 2, [1])
    same_rows(submission, cache(rng, 0, 6, 2), 2, [])


# --- generate -------------------------------------------------------------------------------------


def _story_with(
    submission: Submission, rng: np.random.Generator, *, length: int, token: int | None, limit: int
) -> None:
    """A story after a prompt of this length, of this token if one is given."""
    prompt, script, eos, _ = story_of(rng)
    start = tuple(prompt[:length]) if token is None else (token,) * length
    law = table.scripted_law(VOCABULARY, start, script)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(submission, law, draft, start, max_new_tokens=limit, eos_id=eos, budget=2)


@trap(
    catches="a prompt of one token is refused or fails",
    severity="major",
    story="The root alone is a prompt; the prefix before it is empty.",
    mutant=_refuses("len(prefix) < 2", _ROOTLESS),
    control=lambda submission, rng: _story_with(submission, rng, length=2, token=None, limit=4),
)
def root_alone_refused(submission: Submission, rng: np.random.Generator) -> None:
    _story_with(submission, rng, length=1, token=None, limit=4)


@trap(
    catches="max_new_tokens of 1 is refused, or no token is generated",
    severity="major",
    story="The bound is off by one, or the bonus has no place.",
    mutant=_refuses("limit == 1", _ROOTLESS),
    also=[insert_before(_ROOTLESS, "    limit = 0 if limit == 1 else limit\n")],
    control=lambda submission, rng: _story_with(submission, rng, length=3, token=None, limit=2),
)
def limit_of_one_refused(submission: Submission, rng: np.random.Generator) -> None:
    _story_with(submission, rng, length=3, token=None, limit=1)


@trap(
    catches="token 0 is refused in a prompt or a tree",
    severity="major",
    story="More than 0 is asked of a token id where at least 0 is meant.",
    mutant=edit('"a prompt\'s token", least=0', '"a prompt\'s token", least=1'),
    also=[
        insert_after(_CHOICES, _no("min(tokens, default=1) < 1")),
        insert_after(_CHOICES, _no("min([*tokens, *choices]) < 1")),
    ],
)
def token_zero_refused(submission: Submission, rng: np.random.Generator) -> None:
    other = int(rng.integers(1, VOCABULARY))
    table.verify(submission, [0, other], [-1, 0], [0, other, 0], ([0, 1], 0))
    law = table.scripted_law(VOCABULARY, (0, 0), [2, 3, 4, 5])
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(submission, law, draft, (0, 0), max_new_tokens=3, eos_id=1, budget=2)


_END = '    eos_id = whole(eos_id, "eos_id", least=0)\n'


def _end_of_another_id(submission: Submission, rng: np.random.Generator) -> None:
    _ends_with(submission, rng, 1 + int(rng.integers(VOCABULARY - 1)))


@trap(
    catches="an eos_id of 0 is refused, or taken for none",
    severity="major",
    story="`if eos_id` in place of `is not None`: token 0 then ends nothing.",
    mutant=edit(_END, _END + "    eos_id = eos_id or -1\n"),
    also=[edit(_END, _END.replace("=0", "=1"))],
    control=_end_of_another_id,
)
def end_of_id_zero(submission: Submission, rng: np.random.Generator) -> None:
    _ends_with(submission, rng, 0)


def _ends_with(submission: Submission, rng: np.random.Generator, eos: int) -> None:
    others = [token for token in range(VOCABULARY) if token != eos]
    prompt, script = (int(rng.choice(others)),) * 2, [int(rng.choice(others)) for _ in range(8)]
    script[2] = eos
    law = table.scripted_law(VOCABULARY, prompt, script)
    for drafts in (table.perfect_draft, table.hopeless_draft):
        draft = drafts(law, 2, VOCABULARY)
        table.run(submission, law, draft, prompt, max_new_tokens=6, eos_id=eos, budget=2)
