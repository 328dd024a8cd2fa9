"""The contract of the KV cache, and what is measured beside it."""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Call, Precision, case, robustness
from trapline.arena.process.proxy import Submission
from trapline.arena.process.transcript import Transcript
from trapline.gold.kv_cache.oracle import ListCache, attention, max_context, quantization_step

Rng = np.random.Generator

#: Checks of memory in a process of their own.
SLOW = frozenset({"made-for-an-earlier-cache", "scores-of-all-pairs"})

#: Every kind with every number of bits it takes.
KINDS = (
    ("dense", None),
    ("paged", None),
    ("quantized", 8),
    ("quantized", 4),
    ("paged_quantized", 8),
    ("paged_quantized", 4),
)
PAGED = (("paged", None), ("paged_quantized", 8))
CONTIGUOUS = (("dense", None), ("quantized", 8))
#: Every kind once.
EACH = (*CONTIGUOUS, ("paged", None), ("paged_quantized", 4))
PLAIN = (("dense", None), ("paged", None))
QUANTISED = tuple((kind, bits) for kind, bits in KINDS if bits)
#: An element comes back within this many quantisation steps.
STEPS = 0.51
#: Methods whose first argument is a sequence, with valid further ones for 2 heads of width 4.
ROWS = np.ones((1, 2, 4))
METHODS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("append", (0, ROWS, ROWS)),
    ("attend", (0, ROWS)),
    ("view", (0,)),
    ("fork", ()),
    ("keep", ([0],)),
    ("truncate", (0,)),
    ("free", ()),
    ("length", ()),
)


def is_int(value: Any) -> bool:
    """A whole number, Python's or NumPy's."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def attention_tolerance(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """What rounding can do to an attention output, whatever the order of its sums.

    A score of magnitude M carries D roundings of M; its weight inherits them; the output sums S.
    """
    width = q.shape[-1]
    score = float(np.abs(q).max() * np.abs(k).max()) * width**0.5
    eps = float(np.finfo(q.dtype).eps)
    return float(eps * np.abs(v).max() * (4 * (width + 4) * score + len(k) + 16))


def check_attention(
    got: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, what: str = "attention"
) -> None:
    """`got` is the causal attention of q, the last positions of k and v, in q's dtype."""
    got = expect.array(got, shape=q.shape, dtype=q.dtype, what=what)
    want = attention(q, k, v)
    expect.close(got, want, atol=attention_tolerance(q, k, v), what=what)


def judged(entry: str, answer: Any) -> Any:
    """What the contract fixes: rows within rounding of their scales, not sizes or numbers of ours.

    A quantised row depends on how its scale is rounded, so that values count in float32, beside
    whether they have more digits than that.
    """
    if entry in ("make_cache", "add", "fork", "nbytes"):
        return None
    if entry == "max_context" and isinstance(answer, tuple | list) and len(answer) == 2:
        tokens, terms = answer
        names = ("bytes_per_token", "budget_bytes")
        known = terms if isinstance(terms, dict) else {}
        return [tokens, *(float(known[name]) for name in names if is_number(known.get(name)))]
    if isinstance(answer, np.ndarray) and answer.dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrow = answer.astype(np.float32)
        return [str(answer.dtype), bool(np.all((narrow == answer) | (answer != answer))), narrow]
    if isinstance(answer, tuple | list):
        return [judged(entry, part) for part in answer]
    return answer


def not_offered(transcript: Transcript) -> str:
    """A kind of cache that `make_cache` refuses although the contract names it."""
    last = transcript.exchanges[-1]
    if last.returned or last.died:
        return ""
    if last.entry == "make_cache":
        kind = last.args[0] if last.args else None
        sizes = [size for name, size in last.kwargs.items() if name != "bits"]
        valid = (kind, last.kwargs.get("bits")) in KINDS
        if valid and all(is_int(size) and size >= 1 for size in sizes):
            return f"a cache of kind {kind!r}"
    return f"{last.entry} as asked for here" if last.raised == "NotImplementedError" else ""


class Twin:
    """A cache under test beside a list of arrays. Every step is taken by both, then compared."""

    def __init__(
        self,
        submission: Submission,
        rng: Rng,
        kind: str = "paged",
        bits: int | None = None,
        *,
        layers: int = 2,
        heads: int = 2,
        group: int = 1,
        width: int = 4,
        page: int = 4,
        pages: int = 16,
        dtype: Any = np.float64,
    ) -> None:
        self.submission = submission
        self.rng, self.kind, self.bits, self.dtype = rng, kind, bits, np.dtype(dtype)
        self.heads, self.group, self.width, self.page = heads, group, width, page
        self.cache = submission.make_cache(
            kind,
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=width,
            block_size=page,
            num_blocks=pages,
            bits=bits,
        )
        self.model = ListCache(layers)
        self._given: set[int] = set()
        self._seen: dict[int, tuple[Any, bytes]] = {}

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def rows(self, n: int) -> np.ndarray:
        """n positions of a key or a value."""
        return self.normal(n, self.heads, self.width)

    def queries(self, n: int) -> np.ndarray:
        return self.normal(n, self.heads * self.group, self.width)

    def add(self, n: int = 0) -> int:
        """A new sequence with n positions in every layer."""
        seq = self._number(self.cache.add(), "add()")
        self.model.add(seq)
        return self.append(seq, n) if n else seq

    def append(self, seq: int, n: int, layers: Sequence[int] | None = None) -> int:
        """n new positions, in all layers unless some are named."""
        layers = range(self.model.num_layers) if layers is None else layers
        for layer in layers:
            self.put(seq, layer, self.rows(n), self.rows(n))
        return seq

    def put(self, seq: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """These rows."""
        self._later("append", seq, layer, k, v)
        self.model.append(seq, layer, k, v)

    def fork(self, seq: int) -> int:
        return self.forks(seq, 1)[0]

    def forks(self, seq: int, count: int) -> list[int]:
        children = [
            self._number(answer, "fork()") for answer in self._ask(*[("fork", (seq,))] * count)
        ]
        for child in children:
            self.model.fork(seq, child)
        return children

    def keep(self, seq: int, indices: Sequence[int]) -> None:
        self._later("keep", seq, list(indices))
        self.model.keep(seq, indices)

    def truncate(self, seq: int, n: int) -> None:
        self._later("truncate", seq, n)
        self.model.truncate(seq, n)

    def free(self, *seqs: int) -> None:
        for seq in seqs:
            self._later("free", seq)
            self.model.free(seq)

    def check(self, *, attend: bool = False) -> None:
        """All sequences: length, what is stored and, if asked for, what attention reads."""
        reads: list[tuple[str, tuple[Any, ...]]] = []
        for seq, layers in self.model.rows.items():
            reads.append(("length", (seq,)))
            for layer, rows in enumerate(layers):
                reads.append(("view", (seq, layer)))
                if attend and rows:
                    q = self.queries(min(len(rows), int(self.rng.integers(1, 4))))
                    reads.append(("attend", (seq, layer, q)))
        for (method, args), answer in zip(reads, self._ask(*reads), strict=True):
            if method == "length":
                self._check_length(args[0], answer)
            elif method == "view":
                k, v = self._check_view(args[0], args[1], answer)
            else:
                seq, layer, q = args
                check_attention(answer, q, k, v, f"attend({seq}, {layer}) of {self.kind}")

    def _later(self, method: str, *args: Any) -> None:
        """A call of the cache that answers nothing; it is made together with the next one."""
        self.submission.call_later([(self.cache, method, args)])

    def _ask(self, *calls: tuple[str, tuple[Any, ...]]) -> Iterator[Any]:
        """Several calls of the cache in one message."""
        return self.submission.call_all([(self.cache, name, args) for name, args in calls])

    def _check_length(self, seq: int, length: Any) -> None:
        expect.that(is_int(length), f"length() answered a {type(length).__name__}, not an int")
        expect.equal(int(length), self.model.length(seq), f"length({seq}) of {self.kind}")

    def refuses(self, kinds: Any, method: str, *args: Any) -> None:
        """The call raises, and leaves everything as it was."""
        expect.raises(kinds, getattr(self.cache, method), *args)
        self.check()

    def _number(self, seq: Any, what: str) -> int:
        """The number of a new sequence: an int that was never used before."""
        expect.that(is_int(seq), f"{what} answered a {type(seq).__name__}, not an int")
        expect.that(seq not in self._given, f"{what} gave out {seq} twice")
        self._given.add(int(seq))
        return int(seq)

    def stored(self, seq: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """What view() returns, after a check against what was appended."""
        return self._check_view(seq, layer, self.cache.view(seq, layer))

    def _check_view(self, seq: int, layer: int, answer: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = self.model.rows[seq][layer]
        expect.that(
            isinstance(answer, tuple | list) and len(answer) == 2,
            "view() answers a pair, keys and values",
        )
        what = f"view({seq}, {layer}) of {self.kind}"
        if not rows:
            for part in answer:
                expect.that(
                    isinstance(part, np.ndarray) and part.shape == (0, self.heads, self.width),
                    f"{what} is not empty where nothing is stored",
                )
            return answer[0], answer[1]
        for part, want, name in zip(answer, self.model.view(seq, layer), "kv", strict=True):
            self._check_rows(part, want, f"{name} of {what}")
        for i, row in enumerate(rows):
            self._check_unchanged(row, answer[0][i].tobytes() + answer[1][i].tobytes(), what)
        return answer[0], answer[1]

    def _check_rows(self, got: Any, want: np.ndarray, what: str) -> None:
        if self.bits is None:
            expect.equal(got, want, what)
            return
        got = expect.array(got, shape=want.shape, dtype=want.dtype, what=what)
        error = np.abs(got.astype(np.float64) - want)
        allowed = STEPS * quantization_step(want, self.bits)
        expect.that(
            bool(np.all(error <= allowed)),
            f"{what}: an element is off by more than {STEPS} quantisation steps",
        )

    def _check_unchanged(self, row: Any, now: bytes, what: str) -> None:
        """A position always reads back as it did the first time."""
        _, before = self._seen.setdefault(id(row), (row, now))
        expect.that(before == now, f"{what}: a stored position changed its value later on")


def twins(
    submission: Submission, rng: Rng, kinds: Iterable[tuple[str, int | None]], **sizes: Any
) -> Iterator[Twin]:
    """A new cache beside its list of arrays, for one kind after the other."""
    for kind, bits in kinds:
        yield Twin(submission, rng, kind, bits, **sizes)


def prefill(
    submission: Submission, twin: Twin, seq: int, total: int, chunk: int, layer: int = 0
) -> None:
    """One chunked prefill of `total` positions, compared with one-shot attention."""
    q, k, v = twin.queries(total), twin.rows(total), twin.rows(total)
    out = submission.chunked_prefill(twin.cache, seq, layer, q, k, v, chunk)
    twin.model.append(seq, layer, k, v)
    keys, values = twin.stored(seq, layer)
    check_attention(out, q, keys, values, f"chunked_prefill with chunk {chunk}")


def _walk(twin: Twin, steps: int) -> None:
    """Random operations on up to four sequences that never exhaust the pool."""
    rng = twin.rng
    twin.add(3)
    for _ in range(steps):
        seq = int(rng.choice(list(twin.model.rows)))
        length = twin.model.length(seq)
        match int(rng.integers(6)):
            case 0 if len(twin.model.rows) < 4:
                twin.fork(seq)
            case 1 if len(twin.model.rows) > 1:
                twin.free(seq)
            case 2 if length:
                twin.truncate(seq, int(rng.integers(length + 1)))
            case 3 if length:
                twin.keep(seq, rng.permutation(length)[: int(rng.integers(length + 1))].tolist())
            case 4 if len(twin.model.rows) < 4:
                twin.add(int(rng.integers(1, 6)))
            case _:
                twin.append(seq, int(rng.integers(1, 6)))
        twin.check()
    twin.check(attend=True)


@case
def dense_follows_a_list_of_arrays(submission: Submission, rng: Rng) -> None:
    _walk(Twin(submission, rng, "dense", pages=64), 9)


@case
def paged_follows_a_list_of_arrays(submission: Submission, rng: Rng) -> None:
    _walk(Twin(submission, rng, "paged", page=3, pages=64), 9)


@case
def quantized_follows_a_list_of_arrays(submission: Submission, rng: Rng) -> None:
    _walk(Twin(submission, rng, "quantized", 8, pages=64), 9)


@case
def paged_quantized_follows_a_list_of_arrays(submission: Submission, rng: Rng) -> None:
    _walk(Twin(submission, rng, "paged_quantized", 4, width=5, pages=64), 9)


@case
def append_and_view(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, KINDS):
        seq = twin.add()
        for n in (1, 5, 2):
            twin.append(seq, n)
        twin.check()


@case
def attend_decodes_and_verifies(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, KINDS):
        seq = twin.add(9)
        k, v = twin.stored(seq, 1)
        for n in (1, 4, 9):
            q = twin.queries(n)
            check_attention(twin.cache.attend(seq, 1, q), q, k, v, f"attend of {n}")


@case
def many_queries_over_many_positions(submission: Submission, rng: Rng) -> None:
    """More than attention handles at a time when it works in pieces."""
    twin = Twin(submission, rng, layers=1, heads=1, width=2, page=16, pages=40)
    k, v, q = twin.rows(600), twin.rows(600), twin.queries(280)
    seq = twin.add()
    twin.put(seq, 0, k, v)
    check_attention(twin.cache.attend(seq, 0, q), q, k, v, "attend of 280 queries")


@case
def every_number_of_query_heads(submission: Submission, rng: Rng) -> None:
    for heads, group in ((1, 1), (1, 4), (3, 1), (2, 3)):
        twin = Twin(submission, rng, heads=heads, group=group)
        prefill(submission, twin, twin.add(3), 3, 2)
        twin.check(attend=True)


@case
def float32_in_float32_out(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, KINDS, dtype=np.float32):
        seq = twin.add(5)
        twin.check(attend=True)
        prefill(submission, twin, seq, 4, 3)


@case
def fork_goes_its_own_way(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, KINDS):
        seq = twin.add(6)
        child = twin.fork(seq)
        twin.append(child, 3)
        twin.append(seq, 1)
        twin.check()


@case
def keep_and_truncate(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, KINDS):
        seq = twin.add(10)
        twin.keep(seq, [0, 1, 2, 3, 4, 7, 5])
        twin.check()
        twin.truncate(seq, 6)
        twin.append(seq, 1)
        twin.check()
        seq = twin.add(14)
        twin.keep(seq, [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 9])  # two whole pages stay in front
        twin.check()


@case
def the_pool_holds_what_it_promises(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, KINDS, page=3, pages=4):
        seq = twin.add(12)
        twin.check()
        rows = twin.rows(1)
        twin.refuses(MemoryError, "append", seq, 0, rows, rows)
        twin.free(seq)
        twin.add(12)


@robustness
def unknown_sequences_are_refused(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        seq = twin.add(3)
        twin.free(twin.add(2))
        for method, args in METHODS:
            for stranger in (seq + 77, -77):
                expect.raises(KeyError, getattr(twin.cache, method), stranger, *args)
        twin.check()
        prompt = (0, twin.queries(2), twin.rows(2), twin.rows(2), 1)
        expect.raises(KeyError, submission.chunked_prefill, twin.cache, seq + 77, *prompt)


@case
def prefill_by_chunks(submission: Submission, rng: Rng) -> None:
    for (kind, bits), chunk in zip(KINDS, (1, 4, 50, 1, 4, 50), strict=True):
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add()
        prefill(submission, twin, seq, 11, chunk)
        twin.check()


@case
def empty_batches(submission: Submission, rng: Rng) -> None:
    for kind, bits in KINDS:
        twin = Twin(submission, rng, kind, bits)
        seq = twin.add(2)
        no_queries = twin.queries(0)
        expect.equal(twin.cache.attend(seq, 0, no_queries), no_queries, "attend without queries")
        out = submission.chunked_prefill(
            twin.cache, seq, 0, no_queries, twin.rows(0), twin.rows(0), 3
        )
        expect.equal(out, no_queries, "a prefill of nothing")
        twin.check()
        fresh = Twin(submission, rng, kind, bits)
        fresh.check()
        seq = fresh.add()
        fresh.check()
        expect.equal(fresh.cache.attend(seq, 0, no_queries), no_queries, "attend without positions")
    # A prefill of nothing takes nothing, not even a copy of a shared page.
    twin = Twin(submission, rng, "paged", pages=1)
    child = twin.fork(twin.add(2))
    no_queries = twin.queries(0)
    submission.chunked_prefill(twin.cache, child, 0, no_queries, twin.rows(0), twin.rows(0), 3)
    twin.check()


@case
def a_decoder_equals_recomputation(submission: Submission, rng: Rng) -> None:
    """Two layers with weights, over ragged prompts and past the first page, token by token."""
    for kind, bits in PLAIN:
        twin = Twin(submission, rng, kind, bits, page=4, pages=8)
        weights = _weights(rng)
        for prompt in (3, 6):
            tokens = rng.standard_normal((prompt + 3, 8))
            _continues(twin, twin.add(), tokens, weights, 0, prompt, 1, 2)


@case
def a_decoder_goes_on_beyond_capacity(submission: Submission, rng: Rng) -> None:
    """What no longer fits is refused and leaves no trace; a freed sequence makes room for it."""
    for kind, bits in PLAIN:
        twin = Twin(submission, rng, kind, bits, page=4, pages=5)
        weights = _weights(rng)
        short, long = rng.standard_normal((9, 8)), rng.standard_normal((21, 8))
        first, second = twin.add(), twin.add()
        _continues(twin, first, short, weights, 0, 3, 4)
        _continues(twin, second, long, weights, 0, 6, 1, 5)
        _has_no_room(twin, first, short[7:9], weights)  # there is room for one of the two
        _continues(twin, first, short, weights, 7, 1)
        _has_no_room(twin, second, long[12:13], weights)
        twin.free(first)
        _continues(twin, second, long, weights, 12, 1, 7)
        _has_no_room(twin, second, long[20:21], weights)


def _weights(rng: Rng) -> np.ndarray:
    """Two layers with the projections of q, k, v and of what attention answers."""
    return rng.standard_normal((2, 4, 8, 8)) / 3


def _continues(
    twin: Twin, seq: int, tokens: np.ndarray, weights: np.ndarray, done: int, *steps: int
) -> None:
    """From token number `done` on, so many tokens in each step, as without a cache."""
    want = _recomputed(tokens, weights)
    size = float(np.abs(want).max())
    for n in steps:
        got = _decoded(twin, seq, tokens[done : done + n], weights)
        what = f"a decoder of two layers on a {twin.kind} cache"
        expect.close(got, want[done : done + n], atol=1e-9 * size, what=what)
        done += n


def _has_no_room(twin: Twin, seq: int, tokens: np.ndarray, weights: np.ndarray) -> None:
    """The first layer refuses these tokens."""
    _, k, v = _projected(tokens, weights[0])
    expect.raises(MemoryError, twin.cache.append, seq, 0, k, v)


def _projected(x: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
    return [(x @ weight).reshape(len(x), 2, 4) for weight in weights[:3]]


def _recomputed(tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Every layer over the whole sequence, without a cache."""
    x = tokens
    for layer in weights:
        q, k, v = _projected(x, layer)
        mixed = attention(q, k, v)
        x = x + np.tanh(mixed.reshape(x.shape) @ layer[3])
    return x


def _decoded(twin: Twin, seq: int, tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The same for the newest tokens only, layer by layer, with the cache."""
    x = tokens
    for number, layer in enumerate(weights):
        q, k, v = _projected(x, layer)
        twin.cache.append(seq, number, k, v)
        mixed = expect.array(
            twin.cache.attend(seq, number, q), shape=q.shape, dtype=q.dtype, what="attend"
        )
        x = x + np.tanh(mixed.reshape(x.shape) @ layer[3])
    return x


def context(submission: Submission, spec: Any, gpu: int, use: float, *rest: int) -> None:
    """One call of max_context against exact fractions, all terms looked at."""
    weights, reserve = rest
    answer = submission.max_context(
        spec, gpu, utilization=use, weight_bytes=weights, reserve_bytes=reserve
    )
    expect.that(isinstance(answer, tuple | list) and len(answer) == 2, "no pair (tokens, terms)")
    tokens, terms = answer
    expect.that(is_int(tokens), f"tokens is a {type(tokens).__name__}, not an int")
    expect.equal(int(tokens), max_context(spec, gpu, Fraction(use), weights, reserve), "tokens")
    expect.that(isinstance(terms, dict), f"terms is a {type(terms).__name__}, not a dict")
    a_token = 2 * spec["num_layers"] * spec["num_kv_heads"] * spec["head_dim"] * spec["bits"] / 8
    for name, want in (
        ("bytes_per_token", a_token),
        ("budget_bytes", use * gpu - weights - reserve),
    ):
        expect.that(name in terms, f"terms lacks {name!r}")
        got = terms[name]
        expect.that(isinstance(got, int | float | np.number), f"terms[{name!r}] is not a number")
        expect.that(abs(float(got) - want) <= 1e-9 * abs(want) + 1e-6, f"terms[{name!r}] is {got}")


@case
def max_context_of_real_models(submission: Submission, _rng: Rng) -> None:
    seven_billion = {"num_layers": 32, "num_kv_heads": 32, "head_dim": 128, "bits": 16}
    context(submission, seven_billion, 80 * 2**30, 1.0, 0, 0)
    context(submission, seven_billion, 80 * 10**9, 1.0, 0, 0)
    context(submission, {**seven_billion, "num_kv_heads": 8}, 80 * 2**30, 0.5, 16 * 10**9, 2**30)


@case
def max_context_of_any_shape(submission: Submission, rng: Rng) -> None:
    for bits in (4, 8, 16, 32):
        sizes = rng.integers(1, 97, size=3).tolist()
        spec = dict(zip(("num_layers", "num_kv_heads", "head_dim"), sizes, strict=True))
        # Floats hold all of this exactly, so the floor is the same in every arithmetic.
        use = float(rng.integers(1, 17)) / 16
        bytes_ = [int(x) for x in rng.integers(0, 2**34, size=2)]
        context(submission, {**spec, "bits": bits}, 2**36, use, *bytes_)


def precision(submission: Submission, rng: Rng) -> list[Precision]:
    """Attention in float32 over a paged cache, long and short, with scores of ordinary size."""
    found = []
    for positions, n in ((64, 3), (700, 1)):
        twin = Twin(
            submission, rng, heads=2, group=2, width=64, layers=1, page=16, pages=48,
            dtype=np.float32,
        )  # fmt: skip
        seq = twin.add(positions)
        k, v = twin.model.view(seq, 0)
        q = 2 * twin.queries(n)
        got = twin.cache.attend(seq, 0, q)
        found.append(Precision(got, attention(q, k, v), _careful(q, k, v)))
    return found


def _careful(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention in q's own dtype: largest score subtracted, one division at the end."""
    out = np.empty_like(q)
    n, heads, width = q.shape
    for h in range(heads):
        keys, values = (x[:, h // (heads // k.shape[1])] for x in (k, v))
        scores = (q[:, h] * q.dtype.type(width**-0.5)) @ keys.T
        late = np.arange(len(k)) > np.arange(n)[:, None] + len(k) - n
        scores = np.where(late, -np.inf, scores).astype(q.dtype)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = weights @ values / weights.sum(axis=1, keepdims=True)
    return out


def speed(submission: Submission, rng: Rng) -> Call:
    """A prompt of 400 positions in chunks of 50 on a paged cache that already holds 200."""
    twin = Twin(
        submission, rng, layers=1, heads=2, group=2, width=32, page=16, pages=38, dtype=np.float32
    )
    seq = twin.add(200)
    q, k, v = twin.queries(400), twin.rows(400), twin.rows(400)
    before = twin.model.view(seq, 0)
    stops = [1, 400, *(int(stop) for stop in rng.integers(2, 400, 10))]

    def check(got: Any) -> None:
        """At random positions, so that computing only some rows does not pass."""
        expect.array(got, shape=q.shape, dtype=q.dtype, what="chunked_prefill")
        keys, values = (np.concatenate(pair) for pair in zip(before, (k, v), strict=True))
        for stop in stops:
            rows, seen = slice(max(0, stop - 2), stop), 200 + stop
            check_attention(got[rows], q[rows], keys[:seen], values[:seen], "chunked_prefill")

    return Call("chunked_prefill", (twin.cache, seq, 0, q, k, v, 50), check=check)


def memory(submission: Submission, rng: Rng, size: int) -> Call:
    """A prefill of `size` positions in chunks of 128: scores of all pairs at once would show."""
    twin = Twin(
        submission, rng, layers=1, heads=1, group=1, width=16, page=64, pages=-(-size // 64),
        dtype=np.float32,
    )  # fmt: skip
    seq = twin.add()
    q, k, v = twin.queries(size), twin.rows(size), twin.rows(size)
    stops = [size, *(int(stop) for stop in rng.integers(3, size, 4))]

    def check(got: Any) -> None:
        expect.array(got, shape=q.shape, dtype=q.dtype, what="chunked_prefill")
        for stop in stops:
            rows = slice(stop - 3, stop)
            check_attention(got[rows], q[rows], k[:stop], v[:stop], "chunked_prefill")

    return Call("chunked_prefill", (twin.cache, seq, 0, q, k, v, 128), check=check)


def measures(submission: Submission, rng: Rng) -> dict[str, float]:
    """What a full cache of 4 bits takes for a token of one layer with one head of width 64."""
    tokens, width = 128, 64
    twin = Twin(
        submission, rng, "paged_quantized", 4, layers=1, heads=1, width=width, page=16,
        pages=tokens // 16,
    )  # fmt: skip
    twin.add(tokens)
    twin.check()
    said = twin.cache.nbytes()
    rows = 2 * tokens * width // 2
    expect.that(is_int(said) and said >= rows, f"nbytes() is {said}, and the rows take {rows}")
    return {"cache bytes per token": said / tokens}
