"""Bugs in the handling of arrays: empty arrays, layouts, dtypes, arrays to refuse."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.flash_attention_forward.cases import (
    REFUSALS,
    Arrays,
    Shape,
    agrees,
    attends,
    form,
    in_scope,
    pair,
    weighed,
)
from trapline.challenges.flash_attention_forward.situations import (
    WRITTEN,
    holds_no_mask,
    holds_no_matrix,
    with_logits,
)
from trapline.challenges.flash_attention_forward.solution_lines import ATTENDED, KEY_LOOP

# Parts of the gold solution that several mutants edit.
_CHECKED = "    _check(q, k, v, tile)\n"
_OUT, _LSE = "np.zeros((B, H, T, D), q.dtype)", "np.zeros((B, H, T), q.dtype)"

_HEADS = "    for b, h in np.ndindex(B, H):\n"

# --- nothing there --------------------------------------------------------------------------------


@trap(
    catches="S = 0 raises (maximum of an empty axis, a tile of zero keys) instead of giving zeros "
    "and −inf",
    severity="major",
    story="It happens with an empty cache on the first step, or an empty document in a packed "
    "batch.",
    mutant=edit(KEY_LOOP, "for start in range(0, max(stop, 1), tile):"),
    also=(
        insert_after(
            _CHECKED, '    if k.shape[2] == 0:\n        raise ValueError("there are no keys")\n'
        ),
        insert_after(_CHECKED, "    tile = min(tile, k.shape[2])\n"),
    ),
    seen=WRITTEN,
)
def no_keys(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=3, S=0).draw(rng), causal=causal, tile=4)


def _without_keys(lse: str) -> Mutant:
    """An early return where there are no keys."""
    return insert_before(_HEADS, f"    if S == 0:\n        return out, {lse}\n")


@trap(
    catches="without any key (S = 0) lse is 0, or another number, instead of −inf",
    severity="minor",
    story="An early return for S = 0 answers zeros for both results.",
    mutant=_without_keys("lse"),
    also=[_without_keys("np.full_like(lse, np.inf)"), _without_keys("np.full_like(lse, np.nan)")],
    seen=WRITTEN,
)
def no_keys_lse_zero(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=3, S=0).draw(rng))


@trap(
    catches="T = 0 raises (a tile clamped to zero) instead of giving empty arrays",
    severity="minor",
    story="It happens when a scheduler passes a request with nothing new to compute.",
    mutant=insert_after(_CHECKED, "    tile = min(tile, q.shape[2])\n"),
    seen=WRITTEN,
)
def no_queries(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=0, S=3).draw(rng), causal=causal, tile=4)


@trap(
    catches="B = 0 raises (stacking nothing) instead of giving empty arrays",
    severity="minor",
    story="The last rank of a sharded evaluation gets an empty batch.",
    mutant=edit(
        "out = np.zeros((B, H, T, D), q.dtype)",
        "out = np.stack([np.zeros((H, T, D), q.dtype) for _ in range(B)])",
    ),
    seen=WRITTEN,
)
def no_batch(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(B=0, H=2, G=2, T=3, S=3).draw(rng), tile=4)


# --- arrays as they come --------------------------------------------------------------------------


def _packed(name: str) -> str:
    """The array is read from its first element on as if it were contiguous."""
    strides = f"np.empty({name}.shape, {name}.dtype).strides"
    return f"    {name} = np.lib.stride_tricks.as_strided({name}, strides={strides})\n"


@trap(
    catches="inputs are read as if they were contiguous",
    severity="major",
    story="Projections come out as (B,T,H,D) and are viewed as (B,H,T,D): a transposed view, not a "
    "copy.",
    mutant=insert_after(_CHECKED, _packed("q")),
    also=[
        insert_after(_CHECKED, "".join(map(_packed, names))) for names in ("k", "v", "kv", "qkv")
    ],
)
def strides_ignored(submission: Submission, rng: np.random.Generator) -> None:
    plain = [rng.standard_normal((2, 6, 3, 4)) for _ in range(3)]
    q, k, v = (x.transpose(0, 2, 1, 3) for x in plain)
    attends(submission, q, k, v, causal=True, tile=4)
    attends(submission, q[:, ::-1, ::2], k[:, ::-1, ::-2], v[:, :, ::2], tile=2)
    row = rng.standard_normal((1, 1, 1, 4))
    attends(submission, np.broadcast_to(row, q.shape), k, v, causal=True, tile=4)


def _transposed(rng: np.random.Generator) -> Arrays:
    """q, k, v (2, 3, 6, 4) as views of arrays (B, T, H, D)."""
    q, k, v = (rng.standard_normal((2, 6, 3, 4)).transpose(0, 2, 1, 3) for _ in range(3))
    return q, k, v


def _answered(submission: Submission, inputs: Arrays) -> None:
    """These arrays themselves are asked, and no copies with another order of memory."""
    answer = submission.flash_attention(*inputs, causal=True, tile=4)
    agrees(answer, *inputs, True, submission.scope)


def contiguous(submission: Submission, rng: np.random.Generator) -> None:
    """The same arrays, contiguous."""
    q, k, v = map(np.ascontiguousarray, _transposed(rng))
    _answered(submission, (q, k, v))


@trap(
    catches="out is written into a copy where q is a transposed view, and stays zero",
    severity="major",
    story="zeros_like keeps the order of memory, and a reshape of such an array is a copy.",
    mutant=edits(
        (f"out = {_OUT}", "out = np.zeros_like(q)\n    flat = out.reshape(B * H, T, D)"),
        (ATTENDED, ATTENDED.replace("out[b, h, rows]", "flat[b * H + h, rows]")),
    ),
    seen=WRITTEN,
    control=contiguous,
)
def out_lost_in_a_copy(submission: Submission, rng: np.random.Generator) -> None:
    _answered(submission, _transposed(rng))


@trap(
    catches="q is scaled in place",
    severity="critical",
    story="A second call with the same q then returns another result; the check compares the "
    "arguments after the call.",
    mutant=edit("q = q * D**-0.5", "q *= D**-0.5"),
    seen=WRITTEN,
)
def inputs_modified(submission: Submission, rng: np.random.Generator) -> None:
    # Width 3: dividing by its scale again does not give back every number.
    inputs = in_scope(submission.scope, *Shape(H=2, G=1, T=64, S=64, D=3).draw(rng))
    # A tile of all queries may be the caller's array, where smaller ones are copies.
    for causal, tile in ((False, 4), (True, 4), (False, 64)):
        _, after = submission.observe("flash_attention", *inputs, causal=causal, tile=tile)
        for name, left, given in zip("qkv", after, inputs, strict=True):
            expect.equal(left, given, f"{name} after the call")


@trap(
    catches="float64 inputs pass through float32",
    severity="major",
    story="The result has dtype float64 but single precision: errors of 1e-8 instead of 1e-15.",
    mutant=edit("q = q * D**-0.5", "q = (q * D**-0.5).astype(np.float32)"),
)
def double_through_single(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=8, S=8, D=8).draw(rng)
    attends(submission, q + 1 / 3, k, v + 1 / 3, tile=4)


@trap(
    catches="float32 inputs pass through float16",
    severity="major",
    story="Tensor cores often use half precision inside; a caller with float32 did not ask for it.",
    mutant=edit("= q @ k[cols].T", "= (q @ k[cols].T.astype(np.float16)).astype(q.dtype)"),
)
def single_through_half(submission: Submission, rng: np.random.Generator) -> None:
    # 5 + 2⁻⁹ lies halfway between two numbers of float16, and is exact in float32.
    q, k, v = with_logits(rng, np.array([5.0, 5.0 + 2.0**-9, 5.0 + 2.0**-9]), 3, np.float32)
    v[0, 0] = np.array([[1.0], [-1.0], [-1.0]])
    attends(submission, q, k, v, tile=2)


@trap(
    catches="an axis of size one disappears on the way",
    severity="major",
    story="squeeze() removes the intended axis and every other axis of length one.",
    mutant=edit("scores = q @ k[cols].T", "scores = np.squeeze(q @ k[cols].T)"),
)
def axes_of_one_squeezed(submission: Submission, rng: np.random.Generator) -> None:
    for causal in (False, True):
        attends(submission, *Shape(T=1, S=1, D=1).draw(rng), causal=causal)
        attends(submission, *Shape(T=3, S=1, D=2).draw(rng), causal=causal)
        attends(submission, *Shape(T=1, S=3, D=1).draw(rng), causal=causal, tile=2)


@trap(
    catches="float32 inputs give a float64 output",
    severity="minor",
    story="1/np.sqrt(D) is a float64 scalar and silently promotes what it is multiplied with.",
    mutant=edit("np.zeros((B, H, T, D), q.dtype)", "np.zeros((B, H, T, D))"),
)
def output_in_double(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=5, S=5).draw(rng, np.float32), tile=4)


@trap(
    catches="an answer is kept from an earlier call of the same shape",
    severity="major",
    story="A memo keyed by shape makes any benchmark look fast.",
    mutant=edits(
        ("import numpy as np\n", "import numpy as np\n\n_ANSWERS = {}\n"),
        (
            _CHECKED,
            _CHECKED + "    key = q.shape, k.shape, causal, tile\n"
            "    if key in _ANSWERS:\n"
            "        return _ANSWERS[key]\n",
        ),
        ("    return out, lse\n", "    _ANSWERS[key] = out, lse\n    return out, lse\n"),
    ),
)
def answers_remembered_by_shape(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(3):
        attends(submission, *Shape(T=4, S=4).draw(rng), causal=True, tile=3)


def _pooled(*arrays: str) -> Mutant:
    """These arrays of the answer come from a pool by shape and dtype."""
    keys = {_OUT: "(B, H, T, D, q.dtype)", _LSE: "(B, H, T, q.dtype)"}
    return edits(
        ("import numpy as np\n", "import numpy as np\n\n_POOL = {}\n"),
        *((array, f"_POOL.setdefault({keys[array]}, {array})") for array in arrays),
    )


@trap(
    catches="the arrays of an earlier answer are used again and overwritten",
    severity="major",
    keeps_state=True,
    story="Outputs come from a pool keyed by shape: a caller that keeps two answers finds the "
    "second one in both.",
    mutant=_pooled(_OUT, _LSE),
    also=[_pooled(_OUT), _pooled(_LSE)],
    seen=WRITTEN,
)
def answer_overwritten_later(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(2):
        _, shared = submission.sharing("flash_attention", *Shape(T=4, S=4).draw(rng))
        expect.that(not shared.earlier_answer, "an answer lies in the memory of an earlier one")


#: Queries and keys of the situations of memory.
_LENGTH = 4608


def memory_rise(submission: Submission, rng: np.random.Generator, causal: bool) -> int:
    """By how many bytes memory rises in a call; its last rows are right."""
    q, k, v = Shape(T=_LENGTH, S=_LENGTH).draw(rng, np.float32)
    answer, rise = weighed(submission, "flash_attention", q, k, v, causal=causal, tile=64)
    out, lse = pair(answer)
    scope = submission.scope
    form(scope, out, q, q.dtype, "out")
    if scope.has("lse"):
        form(scope, lse, q[..., 0], q.dtype, "lse")
    last = out[:, :, -2:], lse[:, :, -2:] if scope.has("lse") else None
    agrees(last, q[:, :, -2:], k, v, causal, scope)
    return rise


@trap(
    catches="memory that grows as T·S, causal or not: the whole score matrix, or another array of "
    "all pairs such as the distances of their positions, is held",
    severity="major",
    story="Avoiding this is the purpose of flash attention. 4608 queries and keys have 81 MiB of "
    "scores; half of that is far more than tiles and accumulators need.",
    mutant=insert_after(_CHECKED, "    tile = max(q.shape[2], k.shape[2], 1)\n"),
    also=[insert_after(_CHECKED, "    np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]\n")],
    seen=WRITTEN,
)
def score_matrix_in_memory(submission: Submission, rng: np.random.Generator) -> None:
    holds_no_matrix(memory_rise(submission, rng, False), _LENGTH**2, "scores")


@trap(
    catches="the scores are tiled, but the causal mask is made for all T·S pairs at once",
    severity="major",
    story="One byte a pair is still quadratic: at 128k tokens the mask alone has 16 GiB.",
    mutant=edits(
        (
            "    rows, D = q.shape\n    q = q * ",
            "    rows, D = q.shape\n"
            "    pairs = np.arange(len(k)) > np.arange(len(k))[:, None]\n"
            "    q = q * ",
        ),
        (
            "scores[_hidden(position, rows, cols)] = -np.inf",
            "scores[_hidden(position, rows, cols) | pairs[-1, cols]] = -np.inf",
        ),
    ),
    also=[
        insert_after(
            _CHECKED, f"    causal and np.triu(np.ones((q.shape[2], k.shape[2]), {kind}), 1)\n"
        )
        for kind in ("bool", "q.dtype")
    ],
    seen=WRITTEN,
)
def mask_for_all_pairs(submission: Submission, rng: np.random.Generator) -> None:
    holds_no_mask(lambda causal: memory_rise(submission, rng, causal), _LENGTH**2)


# --- what must be refused -------------------------------------------------------------------------


@trap(
    catches="an H that is not a multiple of G does not raise ValueError",
    severity="major",
    story="Integer division rounds: the last heads read beyond the end or silently share a head.",
    mutant=edit(" or q.shape[1] % k.shape[1]", ""),
    dimension="robustness",
)
def uneven_groups_accepted(submission: Submission, rng: np.random.Generator) -> None:
    for H, G in ((5, 2), (2, 4), (3, 2)):
        inputs = Shape(H=H, G=G).draw(rng)
        expect.raises(ValueError, submission.flash_attention, *inputs)


@trap(
    catches="a negative tile makes every loop empty and gives zeros",
    severity="minor",
    story="range(0, T, -3) is legal and empty: it returns zeros without an error.",
    mutant=edit("if tile < 1:", "if tile == 0:"),
    dimension="robustness",
)
def negative_tile_accepted(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape().draw(rng)
    for tile in (-3, -1, 0):
        expect.raises(REFUSALS, submission.flash_attention, *inputs, tile=tile)


@trap(
    catches="integer arrays are accepted, and the answer is rounded to integers",
    severity="minor",
    story="Outputs allocated in the input's dtype turn every weight into 0.",
    mutant=edit('x.dtype.kind == "f"', 'x.dtype.kind in "fiu"'),
    dimension="robustness",
)
def integers_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = (np.rint(4 * x).astype(np.int64) for x in Shape().draw(rng))
    expect.raises(REFUSALS, submission.flash_attention, q, k, v)


@trap(
    catches="complex arrays are accepted, although their softmax has no meaning here",
    severity="minor",
    story="NumPy orders complex numbers, so the maximum works and so does everything after it.",
    mutant=edit('x.dtype.kind == "f"', 'x.dtype.kind in "fc"'),
    dimension="robustness",
)
def complex_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = (x.astype(np.complex128) for x in Shape().draw(rng))
    expect.raises(REFUSALS, submission.flash_attention, q, k, v)


@trap(
    catches="v may be longer than k, and its tail is ignored",
    severity="minor",
    story="Keys and values of different length are a bug of the caller; slicing hides it.",
    mutant=edit("k.shape != v.shape or ", ""),
    dimension="robustness",
    seen=WRITTEN,
)
def longer_values_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=6).draw(rng)
    expect.raises(REFUSALS, submission.flash_attention, q, k[:, :, :5], v)


@trap(
    catches="keys of more batch rows than queries are accepted and the rest ignored",
    severity="minor",
    story="Loops over q's batch ignore the other rows of k and v.",
    mutant=edit("(q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])", "q.shape[3] != k.shape[3]"),
    dimension="robustness",
)
def larger_batch_of_keys_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(B=3, T=4, S=6).draw(rng)
    expect.raises(REFUSALS, submission.flash_attention, q[:2], k, v)


@trap(
    catches="one batch row of keys and values is broadcast over all batch rows of queries",
    severity="minor",
    story="A product of whole arrays broadcasts an axis of length one without a word.",
    mutant=edits(
        (
            "(q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])",
            "k.shape[0] not in (1, q.shape[0]) or q.shape[3] != k.shape[3]",
        ),
        ("k[b, g], v[b, g]", "k[b % len(k), g], v[b % len(v), g]"),
    ),
    seen=WRITTEN,
    dimension="robustness",
)
def one_batch_of_keys_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(B=3, T=4, S=6).draw(rng)
    expect.raises(REFUSALS, submission.flash_attention, q, k[:1], v[:1])


@trap(
    catches="arrays of three axes are taken for a batch of one",
    severity="minor",
    story="The missing axis is added silently, and the answer has an axis more than the question.",
    mutant=insert_before(
        _CHECKED,
        "    if q.ndim == 3:\n        q, k, v = q[None], k[None], v[None]\n",
    ),
    dimension="robustness",
)
def three_axes_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=6).draw(rng)
    expect.raises(REFUSALS, submission.flash_attention, q[0], k[0], v[0])


@trap(
    catches="v of width 1 is broadcast over the width of q",
    severity="minor",
    story="Any other width raises an error in an addition; one column is broadcast.",
    mutant=edit("k.shape != v.shape", "k.shape[:3] != v.shape[:3]"),
    dimension="robustness",
)
def one_column_of_values_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(T=4, S=6).draw(rng)
    for width in (1, 3):
        expect.raises(REFUSALS, submission.flash_attention, q, k, v[..., :width])


@trap(
    catches="of the shape of v only its length is compared with that of k",
    severity="minor",
    story="A v of one head, one batch row or one column is answered, or ends somewhere else.",
    mutant=edit("k.shape != v.shape", "k.shape[2] != v.shape[2]"),
    dimension="robustness",
)
def shape_of_values_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(B=3, H=4, G=2, T=4, S=6).draw(rng)
    for wrong in (v[..., :1], v[:, :1], v[:1]):
        expect.raises(REFUSALS, submission.flash_attention, q, k, wrong)


@trap(
    catches="v of one head, or of a batch of one, is broadcast over the heads or the batch of k",
    severity="minor",
    story="Only the lengths of k and v are compared, and a product broadcasts an axis of length "
    "one without a word.",
    mutant=edits(
        (
            "k.shape != v.shape",
            "(k.shape[0], k.shape[2:]) != (v.shape[0], v.shape[2:]) "
            "or v.shape[1] not in (1, k.shape[1])",
        ),
        ("v[b, g]", "v[b, g % v.shape[1]]"),
    ),
    also=[
        edits(
            ("k.shape != v.shape", compared),
            ("v[b, g]", "np.broadcast_to(v, (*k.shape[:2], *v.shape[2:]))[b, g]"),
        )
        for compared in ("k.shape[2:] != v.shape[2:]", "k.shape[2] != v.shape[2]")
    ],
    dimension="robustness",
    seen=WRITTEN,
)
def one_head_of_values_accepted(submission: Submission, rng: np.random.Generator) -> None:
    q, k, v = Shape(B=3, H=4, G=2, T=4, S=6).draw(rng)
    expect.raises(REFUSALS, submission.flash_attention, q, k, v[:, :1])
    expect.raises(REFUSALS, submission.flash_attention, q, k, v[:1])


@trap(
    catches="only q's dtype is checked; integer keys or values are promoted silently",
    severity="minor",
    story="Outputs have the dtype of q, so only q is checked; a quantised cache that was never "
    "dequantised comes in through k and v.",
    mutant=edit("for x in (q, k, v))", "for x in (q, k))"),
    also=[edit("for x in (q, k, v))", f"for x in {checked})") for checked in ("(q, v)", "(q,)")],
    seen=WRITTEN,
    dimension="robustness",
)
def integers_in_one_array_accepted(submission: Submission, rng: np.random.Generator) -> None:
    inputs = Shape(T=4, S=6).draw(rng)
    for place in range(3):
        mixed = list(inputs)
        mixed[place] = np.rint(4 * mixed[place]).astype(np.int64)
        expect.raises(REFUSALS, submission.flash_attention, *mixed)


@trap(
    catches="an early return for empty arrays comes before the checks",
    severity="minor",
    story="The shortcut is added last and placed first; a wrong number of heads is then reported "
    "only for non-empty input.",
    mutant=insert_before(
        _CHECKED,
        "    if q.size == 0 or k.size == 0:\n"
        "        return np.zeros(q.shape, q.dtype), np.full(q.shape[:3], -np.inf, q.dtype)\n",
    ),
    seen=WRITTEN,
    dimension="robustness",
)
def empty_problem_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    for empty in ({"B": 0}, {"T": 0}, {"S": 0}):
        uneven = Shape(H=3, G=2, **empty).draw(rng)
        expect.raises(ValueError, submission.flash_attention, *uneven)
        q, k, v = Shape(**empty).draw(rng)
        expect.raises(REFUSALS, submission.flash_attention, q, k, v, tile=0)


@trap(
    catches="a tile of 1 is refused, or answered wrongly",
    severity="major",
    story="The check asks for more than 1 where it means at least 1.",
    mutant=edit("    if tile < 1:\n", "    if tile <= 1:\n"),
)
def tile_of_one_refused(submission: Submission, rng: np.random.Generator) -> None:
    attends(submission, *Shape(T=3, S=3).draw(rng), tile=1)
