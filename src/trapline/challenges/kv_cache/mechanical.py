"""Mechanical mutants of the gold solution that the checks need not catch, with the reason."""

#: Why these are right answers by the prompt: reason → places.
_REASONS: dict[str, tuple[str, ...]] = {
    "0 / 0 becomes code 0, and the scale is 0 too": ("IntCodec.encode/constant/3",),
    "the divisor of a row of zeros does not matter": ("IntCodec.encode/constant/4",),
    "numbers of sequences are the cache's own choice; they stay different": (
        "Cache.__init__/constant/1",
        "Cache._register/arithmetic/1",
        "Cache._register/constant/1",
    ),
    "an append of no positions is left open": ("Cache.append/never/1",),
    "how many queries attend at a time is a free choice": ("<module>/constant/1",),
    "the look-up that follows raises the same KeyError": (
        "Cache.fork/drop-statement/1",
        "Cache.keep/drop-statement/1",
        "Cache.truncate/drop-statement/1",
        "Cache.free/drop-statement/1",
        "Cache.length/drop-statement/1",
        "Cache._check_seq/never/1",
        "Cache._check_seq/bool/1",
        "Cache._check_place/drop-statement/1",
    ),
    "whether a dense fork needs room is left open": (
        "Cache.fork/drop-statement/2",
        "DenseCache._check_fork/drop-statement/1",
    ),
    "an empty table without a sequence remains; no call can reach it": (
        "Cache.free/drop-statement/3",
    ),
    "all fields of a row have the same length": (
        "DenseCache._write/constant/1",
        "DenseCache._write/constant/2",
        "DenseCache._write/constant/3",
        "PagedCache._write/constant/1",
    ),
    "how fast an array grows is not part of the contract; it always has room": (
        "DenseCache._write/compare/1",
        "DenseCache._write/arithmetic/2",
        "DenseCache._write/drop-operand/2",
        "DenseCache._write/arithmetic/3",
        "DenseCache._write/drop-operand/3",
        "DenseCache._write/constant/4",
        "DenseCache._write/constant/5",
    ),
    "both sides have the same length here, whether checked or not": (
        "DenseCache._write/drop-keyword/1",
        "DenseCache._write/constant/6",
        "PagedCache._write/drop-keyword/1",
        "PagedCache._write/constant/2",
        "PagedCache._gather/drop-keyword/1",
        "PagedCache._gather/constant/3",
    ),
    "a page that is taken is set to one holder, whatever stood there": (
        "PagedCache.__init__/constant/1",
    ),
    "what a page table takes is within the slack that the prompt grants": (
        "PagedCache.nbytes/arithmetic/1",
        "PagedCache.nbytes/drop-operand/1",
        "PagedCache.nbytes/constant/1",
        "PagedCache.nbytes/drop-operand/2",
    ),
    "NumPy takes any negative size for the unknown one": ("PagedCache._read/constant/1",),
    "a list of ints becomes int64 by itself; nothing is looked up in an empty table": (
        "PagedCache._address/drop-keyword/1",
    ),
    "NumPy integers as arguments are left open": ("is_int/drop-operand/1",),
}
#: Mechanical mutants that are equivalent to the gold solution, with the reason.
EQUIVALENT: dict[str, str] = {
    f"solution.py:{place}": reason for reason, places in _REASONS.items() for place in places
}
