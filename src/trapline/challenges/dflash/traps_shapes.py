"""Arrays of a wrong kind, rank or length that are accepted."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.dflash.situations import VOCABULARY, refused
from trapline.challenges.dflash.traps_refusals import FAIR_LAW, FAIR_NUMBERS, draft

_TOKENS = '    tokens = checked_ints(tokens, len(parents), "tokens")\n'
_CHOICES = '    choices = checked_ints(choices, len(parents) + 1, "choices")\n'
_WHOLE = '    prefix_len = whole(prefix_len, "prefix_len", least=0)\n'
_CHAIN = np.array([4, 5]), np.array([-1, 0])


@trap(
    catches="floating-point tokens are accepted",
    severity="minor",
    story="A conversion to integers cuts fractions off without a word.",
    mutant=insert_before(_TOKENS, "    tokens = np.asarray(tokens).astype(np.int64)\n"),
    dimension="robustness",
)
def floating_tokens_accepted(submission: Submission, rng: np.random.Generator) -> None:
    tokens, parents = _CHAIN
    refused(submission, "verify_tree", tokens.astype(float), parents, rng.integers(0, 9, 3))


@trap(
    catches="floating-point choices are accepted",
    severity="minor",
    story="A conversion to integers cuts fractions off without a word.",
    mutant=insert_before(_CHOICES, "    choices = np.asarray(choices).astype(np.int64)\n"),
    dimension="robustness",
)
def floating_choices_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "verify_tree", *_CHAIN, rng.integers(0, 9, 3).astype(float))


@trap(
    catches="integer arrays of two axes are accepted and flattened",
    severity="minor",
    story="`ravel` takes every shape; a batch of trees then looks like one.",
    mutant=edit("    array = np.asarray(values)\n", "    array = np.asarray(values).ravel()\n"),
    dimension="robustness",
)
def integers_of_two_axes_accepted(submission: Submission, rng: np.random.Generator) -> None:
    tokens, parents = _CHAIN
    choices = rng.integers(0, 9, 3)
    refused(submission, "tree_mask", parents[None], 2)
    refused(submission, "verify_tree", tokens[None], parents[None], choices[None])


@trap(
    catches="a draft, laws or numbers with an axis too many or too few are accepted",
    severity="minor",
    story="A missing axis is added, or the first of a batch is taken.",
    mutant=edit(
        "    log_q = np.asarray(log_q)\n",
        "    log_q = np.asarray(log_q)\n    log_q = log_q.reshape(-1, log_q.shape[-1])\n",
    ),
    also=[
        edit("    probs = np.asarray(probs)\n", "    probs = np.atleast_2d(np.asarray(probs))\n"),
        edit(
            "    uniforms = np.asarray(uniforms)\n",
            "    uniforms = np.asarray(uniforms).reshape(-1)\n",
        ),
        edits(
            (
                "    log_q = np.asarray(log_q)\n",
                "    log_q = np.asarray(log_q)\n    log_q = log_q.reshape(-1, log_q.shape[-1])\n",
            ),
            ("    probs = np.asarray(probs)\n", "    probs = np.atleast_2d(np.asarray(probs))\n"),
            (
                "    uniforms = np.asarray(uniforms)\n",
                "    uniforms = np.asarray(uniforms).reshape(-1)\n",
            ),
        ),
    ],
    dimension="robustness",
)
def numbers_of_another_rank_accepted(submission: Submission, rng: np.random.Generator) -> None:
    empty = np.zeros(0, np.int64)
    one = np.array([1]), np.array([-1])
    refused(submission, "build_tree", draft(rng)[0], 2)
    refused(submission, "build_tree", draft(rng)[None], 2)
    refused(submission, "verify_sampled", empty, empty, FAIR_LAW[0], FAIR_NUMBERS[:1])
    refused(submission, "verify_sampled", *one, FAIR_LAW, FAIR_NUMBERS[None])


@trap(
    catches="another number of laws than one for the root and one for each node is accepted",
    severity="minor",
    story="Rows that the walk does not reach are never missed.",
    mutant=edit(
        "    return verify_tree(tokens, parents, choices)\n",
        "    return verify_tree(tokens, parents, choices[: len(tokens) + 1])\n",
    ),
    also=[
        edit(
            "    probs = checked_probs(probs)\n",
            "    probs = checked_probs(probs)[: len(uniforms)]\n",
        ),
        insert_after(
            "    probs = checked_probs(probs)\n",
            "    missing = max(0, len(uniforms) - len(probs))\n"
            "    probs = np.concatenate([probs, [probs[-1]] * missing]) if missing else probs\n",
        ),
    ],
    dimension="robustness",
)
def another_number_of_laws_accepted(submission: Submission, rng: np.random.Generator) -> None:
    one = np.array([1]), np.array([-1])
    numbers = rng.integers(0, 4, 3) / 8
    laws = np.full((3, 2), 0.5)
    refused(submission, "verify_sampled", *one, laws, numbers)
    refused(submission, "verify_sampled", *one, laws, numbers[:2])
    refused(submission, "verify_sampled", *one, laws[:1], numbers[:2])


@trap(
    catches="verification does not check that parents come before their children",
    severity="minor",
    story="The check is in tree_mask alone.",
    mutant=edit(
        "    parents = checked_parents(parents)\n" + _TOKENS,
        '    parents = checked_ints(parents, None, "parents")\n' + _TOKENS,
    ),
    dimension="robustness",
)
def parents_unchecked_by_verification(submission: Submission, rng: np.random.Generator) -> None:
    tokens, choices = np.array([4, 5, 6]), rng.integers(0, 4, 4)
    for parents in ([1, -1, 0], [-1, 1, 0], [-1, -2, 0]):
        refused(submission, "verify_tree", tokens, np.array(parents), choices)


@trap(
    catches="a negative or fractional prefix_len is accepted by compact",
    severity="minor",
    story="A negative end of a slice is valid Python, and int() cuts fractions off.",
    mutant=edit(_WHOLE + "    first", _WHOLE.replace("least=0", "least=-99") + "    first"),
    also=[
        edit(
            _WHOLE + "    first",
            "    prefix_len = int(prefix_len)\n    first",
        )
    ],
    dimension="robustness",
)
def cache_of_a_negative_prefix_accepted(submission: Submission, rng: np.random.Generator) -> None:
    kv = rng.standard_normal((2, 6, 2))
    refused(submission, "compact", kv, -1, [1])
    refused(submission, "compact", kv, 1.5, [1])


@trap(
    catches="a cache of one axis is accepted",
    severity="minor",
    story="Rows without columns are made into columns of their own.",
    mutant=edit(
        '    if kv.dtype.kind != "f" or kv.ndim < 2:\n',
        "    kv = kv[:, None] if kv.ndim == 1 else kv\n"
        '    if kv.dtype.kind != "f" or kv.ndim < 2:\n',
    ),
    also=[
        edits(
            ('    if kv.dtype.kind != "f" or kv.ndim < 2:\n', '    if kv.dtype.kind != "f":\n'),
            (
                "    if max(rows) >= kv.shape[-2]:\n",
                "    if kv.ndim == 1:\n        return kv[rows]\n"
                "    if max(rows) >= kv.shape[-2]:\n",
            ),
        )
    ],
    dimension="robustness",
)
def cache_of_one_axis_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "compact", rng.standard_normal(6), 2, [1])


@trap(
    catches="a fractional prefix_len of a mask or a fractional max_new_tokens is accepted",
    severity="minor",
    story="int() cuts fractions off without a word.",
    mutant=edit(_WHOLE + "    count", "    prefix_len = int(prefix_len)\n    count"),
    also=[
        edit(
            'whole(max_new_tokens, "max_new_tokens", least=0)',
            'whole(int(max_new_tokens), "max_new_tokens", least=0)',
        )
    ],
    dimension="robustness",
)
def fractional_length_accepted(submission: Submission, rng: np.random.Generator) -> None:
    refused(submission, "tree_mask", np.array([-1, 0]), 1.5)
    log_q = draft(rng)
    target = Stub(
        tree_log_probs=lambda prefix, tokens, parents: np.zeros((len(tokens) + 1, VOCABULARY))
    )
    drafter = Stub(block=lambda prefix: log_q)
    settings = {"max_new_tokens": 2.5, "eos_id": 0, "budget": 2}
    refused(submission, "generate", target, drafter, [1], **settings)
