"""Bugs of what is stored where: rows, layers, lengths, views."""

import numpy as np

from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.cases import CONTIGUOUS, EACH, PAGED, PLAIN, Rng, Twin, twins
from trapline.challenges.kv_cache.situations import (
    BLIND,
    kept_in_order,
    layers_in_step,
    never_forked,
)

WRITE = "self._write(seq, layer, start, self.codec.encode(k) + self.codec.encode(v))"
#: The rows that truncate leaves in the last page, or in a contiguous sequence, stay there, in forks
#: as well: whatever is appended goes behind them, and the last rows by the length are not seen.
_REST_OF_THE_PAGE = edits(
    (
        "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
        "        size = self.page_size * (1 if isinstance(self, PagedCache) else self.num_pages)\n"
        "        for layer in range(self.num_layers if self.dtype is not None else 0):\n"
        "            behind = [np.concatenate(both) for both in self._with_behind(seq, layer)]\n"
        "            self.behind[seq, layer] = tuple(f[n : -(-n // size) * size] for f in behind)\n"
        "        self._shrink(seq, n)\n"
        "        self.counts[seq] = [n]",
    ),
    (
        "    def free(self, seq: int)",
        "    def _with_behind(self, seq, layer):\n"
        "        self.behind = getattr(self, 'behind', {})\n"
        "        seen = self._read(seq, layer)\n"
        "        return zip(seen, self.behind.get((seq, layer), [f[:0] for f in seen]))\n\n"
        "    def free(self, seq: int)",
    ),
    (
        "        " + WRITE + "\n",
        "        fields = self.codec.encode(k) + self.codec.encode(v)\n"
        "        behind = getattr(self, 'behind', {}).get((seq, layer))\n"
        "        if behind is not None:\n"
        "            fields = tuple(np.concatenate(both) for both in zip(behind, fields))\n"
        "            self.behind[seq, layer] = tuple(f[len(k) :] for f in fields)\n"
        "        self._write(seq, layer, start, tuple(f[: len(k)] for f in fields))\n",
    ),
    (
        "        self._share(seq, child)\n",
        "        self._share(seq, child)\n"
        "        self.behind = getattr(self, 'behind', {})\n"
        "        for (other, layer), rows in list(self.behind.items()):\n"
        "            if other == seq:\n"
        "                self.behind[child, layer] = rows\n",
    ),
    (
        "        indices = self._check_indices(seq, indices)\n",
        "        indices = self._check_indices(seq, indices)\n"
        "        behind = getattr(self, 'behind', {}).items()\n"
        "        self.behind = {place: rows for place, rows in behind if place[0] != seq}\n",
    ),
    (
        "            self.truncate(seq, len(indices))\n",
        "            self._shrink(seq, len(indices))\n"
        "            self.counts[seq] = [len(indices)] * self.num_layers\n",
    ),
)


@trap(
    catches="view gives values as keys and keys as values",
    severity="major",
    story="A pair of arrays of one shape is packed in one order and unpacked in the other.",
    mutant=edit(WRITE, WRITE.replace("k)", "x)").replace("v)", "k)").replace("x)", "v)")),
)
def keys_stored_as_values(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.add(3)
        twin.check()


@trap(
    catches="keys are stored in place of the values",
    severity="major",
    story="One variable name too few.",
    mutant=edit(WRITE, WRITE.replace("v)", "k)")),
)
def values_are_keys(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.add(3)
        twin.check()


@trap(
    catches="append begins on the last position that is stored and overwrites it",
    severity="major",
    story="An off-by-one error in the write position.",
    mutant=edits(
        (WRITE, WRITE.replace("start,", "max(0, start - 1),")),
        ("= start + len(k)\n", "= max(0, start - 1) + len(k)\n"),
    ),
)
def append_overwrites_the_last(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.append(twin.add(2), 2)
        twin.check()


@trap(
    catches="append replaces what the layer held",
    severity="major",
    story="The rows are assigned where they should be joined.",
    mutant=edit("        start = self.counts[seq][layer]\n", "        start = 0\n"),
)
def append_replaces(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.append(twin.add(2), 2)
        twin.check()


@trap(
    catches="new positions are stored in reverse order",
    severity="major",
    story="Rows are taken from the end of a list, or put in front one by one.",
    mutant=edit(
        WRITE,
        "self._write(seq, layer, start, self.codec.encode(k[::-1]) + self.codec.encode(v[::-1]))",
    ),
)
def append_reversed(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.add(3)
        twin.check()


@trap(
    catches="(n,G,D) is reshaped to (G,n,D) instead of transposed",
    severity="major",
    story="The shapes fit for every n, and heads and positions get mixed.",
    mutant=edit(
        WRITE,
        "k, v = (x.reshape(x.shape[1], -1, x.shape[2]).swapaxes(0, 1) for x in (k, v))\n        "
        + WRITE,
    ),
)
def heads_and_positions_mixed(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.add(3)
        twin.check()


@trap(
    catches="view answers the first layer, whatever layer is asked for",
    severity="major",
    story="A constant layer index left over from a cache of one layer.",
    mutant=edit("fields = self._read(seq, layer)", "fields = self._read(seq, 0)"),
)
def view_of_the_first_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        twin.add(3)
        twin.check()


@trap(
    catches="all layers of a contiguous cache share one array",
    severity="major",
    story="A list of one object times the number of layers.",
    mutant=edits(
        (
            "held = self.rows[seq][layer] or self._row_fields()\n        if stop",
            "held = self.rows[seq][0] or self._row_fields()\n        if stop",
        ),
        (
            "            self.rows[seq][layer] = held\n",
            "            self.rows[seq] = [held] * self.num_layers\n",
        ),
    ),
)
def layers_share_an_array(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS):
        twin.add(3)
        twin.check()


@trap(
    catches="view gives whole pages, the unwritten rest included",
    severity="major",
    story="The rows of a page behind the sequence's end are not cut off.",
    mutant=edit("p.reshape(-1, *p.shape[2:])[:count] for p", "p.reshape(-1, *p.shape[2:]) for p"),
)
def view_of_whole_pages(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        twin.add(6)
        twin.check()


@trap(
    catches="view of a layer that holds nothing is not (0, G, D)",
    severity="minor",
    story="An empty list becomes an array of shape (0,).",
    mutant=edit("empty = np.zeros((0, self.heads, self.width))", "empty = np.zeros(0)"),
)
def view_of_nothing(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.add()
        twin.check()


def _view_of_nothing_raises(error: str) -> Mutant:
    return insert_before(
        "        if self.dtype is None:\n            empty",
        "        if self.counts[seq][layer] == 0:\n"
        f'            raise {error}("need at least one array to concatenate")\n',
    )


@trap(
    catches="view of a layer that holds nothing fails",
    severity="minor",
    story="np.concatenate of an empty list raises, and so does reading rows that are not there.",
    mutant=_view_of_nothing_raises("ValueError"),
    also=[
        _view_of_nothing_raises(error)
        for error in (
            "TypeError",
            "IndexError",
            "KeyError",
            "AttributeError",
            "(IndexError if isinstance(self, PagedCache) else TypeError)",
        )
    ],
    seen=BLIND,
)
def view_of_nothing_fails(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.append(twin.add(), 2, [1])
        twin.check()


@trap(
    catches="one length for all layers: it grows only with the last layer of a step",
    severity="major",
    story="The other layers cannot be read before the step is complete.",
    mutant=edit(
        "        self.counts[seq][layer] = start + len(k)\n",
        "        if layer == self.num_layers - 1:\n"
        "            self.counts[seq] = [start + len(k)] * self.num_layers\n",
    ),
)
def length_grows_with_the_last_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        twin.append(twin.add(), 2, [0])
        twin.check()


@trap(
    catches="one length for all layers: it grows only with the first layer of a step",
    severity="major",
    story="The other layers claim positions that were never appended to them.",
    mutant=edits(
        (
            "        start = self.counts[seq][layer]\n",
            "        start = self.counts[seq][layer] - (len(k) if layer else 0)\n",
        ),
        (
            "        self.counts[seq][layer] = start + len(k)\n",
            "        self.counts[seq] = [start + len(k)] * self.num_layers\n",
        ),
    ),
)
def length_grows_with_the_first_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        seq = twin.add(2)
        twin.append(seq, 1, [0])
        twin.check()


@trap(
    catches="length() is that of the longest layer",
    severity="major",
    story="A position counts as present although some layers do not have it yet.",
    control=layers_in_step,
    mutant=edit("return min(self.counts[seq])", "return max(self.counts[seq])"),
    seen=BLIND,
)
def length_of_the_longest_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        twin.append(twin.add(1), 2, [1])
        twin.check()


@trap(
    catches="length() is that of the last layer",
    severity="major",
    story="The last layer is not always the one that is behind.",
    control=layers_in_step,
    mutant=edit("return min(self.counts[seq])", "return self.counts[seq][-1]"),
)
def length_of_the_last_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        twin.append(twin.add(1), 2, [1])
        twin.append(twin.add(1), 2, [0])
        twin.check()


@trap(
    catches="length() leaves out layers that hold nothing yet",
    severity="major",
    story="Empty layers are taken for layers without a count.",
    control=layers_in_step,
    mutant=edit(
        "return min(self.counts[seq])", "return min(filter(None, self.counts[seq]), default=0)"
    ),
)
def length_without_empty_layers(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH, layers=3):
        twin.append(twin.add(), 3, [0, 2])
        twin.check()


@trap(
    catches="length() is the mean over the layers",
    severity="major",
    story="The positions of all layers are divided by the number of layers.",
    control=layers_in_step,
    mutant=edit("return min(self.counts[seq])", "return sum(self.counts[seq]) // self.num_layers"),
)
def length_of_the_mean_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, EACH):
        twin.append(twin.add(1), 4, [0])
        twin.check()


@trap(
    catches="positions that truncate dropped come back in front of what is appended next",
    severity="critical",
    story="The length is lowered, but the rows stay in the page, and append goes behind them.",
    seen=BLIND,
    mutant=edits(
        (
            "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
            "        self.stale = {**getattr(self, 'stale', {}), seq: self.length(seq)}\n"
            "        self.counts[seq] = [n]",
        ),
        (
            "        " + WRITE + "\n",
            "        fields = self.codec.encode(k) + self.codec.encode(v)\n"
            "        old = getattr(self, 'stale', {}).get(seq, 0) - start\n"
            "        if old < len(k):\n"
            "            old = max(0, old)\n"
            "            fields = tuple(f[: len(k) - old] for f in fields)\n"
            "            self._write(seq, layer, start + old, fields)\n",
        ),
    ),
    also=[_REST_OF_THE_PAGE],
)
def truncated_rows_come_back(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        seq = twin.add(4)
        twin.truncate(seq, 2)
        twin.append(seq, 1)
        twin.check()


@trap(
    catches="a contiguous sequence that grows overwrites and shifts the one stored behind it",
    severity="critical",
    story="All sequences lie in one array, and those behind are not moved.",
    seen=BLIND,
    mutant=insert_after(
        "            array[start:stop] = field\n",
        "        behind = [s for s in self.rows if s > seq and self.counts[s][layer]]\n"
        "        if behind:\n"
        "            read = [self._read(s, layer) for s in behind]\n"
        "            lines = [np.concatenate(parts) for parts in zip(*read, strict=True)]\n"
        "            n = stop - start\n"
        "            lines = [np.concatenate([x[n:], 0 * x[:n]])[: len(x)] for x in lines]\n"
        "            at = 0\n"
        "            for s in behind:\n"
        "                end = at + self.counts[s][layer]\n"
        "                self.rows[s][layer] = tuple(x[at:end] for x in lines)\n"
        "                at = end\n",
    ),
)
def neighbours_not_moved(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1):
        first = twin.add(2)
        twin.add(3)
        twin.append(first, 2)
        twin.check()


@trap(
    catches="a fork holds only the positions that all layers have",
    severity="major",
    story="The fork is cut to the common length in the middle of a step.",
    control=layers_in_step,
    mutant=edit(
        "self._register(list(self.counts[seq]))",
        "self._register([self.length(seq)] * self.num_layers)",
    ),
    seen=BLIND,
)
def fork_drops_what_is_ahead(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        seq = twin.add(2)
        twin.append(seq, 1, [0])
        twin.fork(seq)
        twin.check()


def _empty_fork(where: str) -> Mutant:
    return edits(
        (
            "self._register(list(self.counts[seq]))",
            f"self._register([0 if {where} else n for n in self.counts[seq]])",
        ),
        (
            "        self._share(seq, child)\n",
            f"        if not ({where}):\n            self._share(seq, child)\n",
        ),
    )


@trap(
    catches="a fork starts empty",
    severity="major",
    story="The new sequence is registered, and nothing is copied or shared.",
    mutant=_empty_fork("True"),
    also=[_empty_fork("isinstance(self, DenseCache)"), _empty_fork("isinstance(self, PagedCache)")],
)
def fork_starts_empty(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN):
        twin.fork(twin.add(3))
        twin.check()


@trap(
    catches="a fork of a contiguous cache shares its arrays with the parent",
    severity="major",
    story="A shallow copy: what the parent overwrites after a cut, the child sees.",
    mutant=edits(
        (
            "[tuple(a.copy() for a in fields) for fields in self.rows[seq]]",
            "list(self.rows[seq])",
        ),
        (
            "[tuple(a[:n].copy() for a in fields) for fields in self.rows[seq]]",
            "list(self.rows[seq])",
        ),
    ),
    seen=BLIND,
)
def dense_fork_shares_rows(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS, layers=1):
        seq = twin.add(4)
        twin.fork(seq)
        twin.truncate(seq, 2)
        twin.append(seq, 2)
        twin.check()


@trap(
    catches="keep in a contiguous cache compacts the first layer only",
    severity="major",
    story="Compaction is written for one layer and called once.",
    control=kept_in_order,
    mutant=edit(
        "            tuple(array[indices] for array in self._read(seq, layer))\n",
        "            tuple((array if layer else array[indices])[: len(indices)]\n"
        "                  for array in self._read(seq, layer))\n",
    ),
)
def dense_keep_in_one_layer(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, CONTIGUOUS):
        twin.keep(twin.add(6), [4, 0, 2])
        twin.check()


@trap(
    catches="keep in a contiguous cache moves codes and leaves their scales where they were",
    severity="major",
    story="The codes and the scales are two arrays, and only one is gathered.",
    control=kept_in_order,
    mutant=edit(
        "            tuple(array[indices] for array in self._read(seq, layer))\n",
        "            tuple(\n"
        "                array[: len(indices)] if array.shape[-1] == 1 else array[indices]\n"
        "                for array in self._read(seq, layer)\n"
        "            )\n",
    ),
)
def dense_keep_without_scales(submission: Submission, rng: Rng) -> None:
    for bits in (8, 4):
        twin = Twin(submission, rng, "quantized", bits, layers=1)
        sizes = np.array([1.0, 10.0, 100.0, 1.0])[:, None, None]
        seq = twin.add()
        twin.put(seq, 0, twin.rows(4) * sizes, twin.rows(4) * sizes)
        twin.keep(seq, [2, 0])
        twin.check()


@trap(
    catches="keep moves rows of a page one by one and reads some after they were overwritten",
    severity="major",
    story="In-place compaction is right for ascending indices and wrong for other orders.",
    control=kept_in_order,
    mutant=edit(
        "        kept = [pool[:, pages, slots] for pool in self.pools]\n",
        "        to = self._address(seq, np.arange(start, len(indices)))\n"
        "        scratch = [pool.copy() for pool in self.pools]\n"
        "        for pool in scratch:\n"
        "            for i in range(len(pages)):\n"
        "                pool[:, to[0][i], to[1][i]] = pool[:, pages[i], slots[i]]\n"
        "        kept = [pool[:, to[0], to[1]] for pool in scratch]\n",
    ),
)
def paged_keep_overwrites_its_source(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        twin.keep(twin.add(4), [1, 0, 3])
        twin.check()


@trap(
    catches="keep drops the positions that it is given and keeps the others",
    severity="major",
    story="The list is read as what to evict.",
    mutant=edit(
        "        return indices\n",
        "        return np.setdiff1d(np.arange(self.length(seq)), indices)\n",
    ),
)
def keep_drops_what_it_is_given(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.keep(twin.add(5), [1, 3])
        twin.check()


@trap(
    catches="keep compacts the keys and leaves the values where they were",
    severity="major",
    story="Keys and values are two arrays, and only one is gathered.",
    control=kept_in_order,
    mutant=edits(
        (
            "            tuple(array[indices] for array in self._read(seq, layer))\n",
            "            keys_only(self._read(seq, layer), indices)\n",
        ),
        (
            "        kept = [pool[:, pages, slots] for pool in self.pools]\n",
            "        kept = [pool[:, pages, slots] for pool in self.pools]\n"
            "        at = self._address(seq, np.arange(start, len(indices)))\n"
            "        for i in range(len(kept) // 2, len(kept)):\n"
            "            kept[i] = self.pools[i][:, at[0], at[1]]\n",
        ),
        (
            "def grown(",
            "def keys_only(fields, indices):\n"
            "    half = len(fields) // 2\n"
            "    first = np.arange(len(indices))\n"
            "    return tuple(f[indices if i < half else first] for i, f in enumerate(fields))\n"
            "\n\n"
            "def grown(",
        ),
    ),
)
def keep_moves_keys_only(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.keep(twin.add(5), [3, 1])
        twin.check()


@trap(
    catches="truncate keeps the last n positions instead of the first",
    severity="major",
    story="A slice [-n:] where [:n] is meant.",
    mutant=insert_before(
        "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
        "        if 0 < n < self.length(seq):\n"
        "            self.keep(seq, np.arange(self.length(seq) - n, self.length(seq)))\n"
        "            return\n",
    ),
)
def truncate_keeps_the_end(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.truncate(twin.add(5), 2)
        twin.check()


@trap(
    catches="truncate(seq, n) drops n positions instead of keeping n",
    severity="major",
    story="The other reading of the argument.",
    mutant=insert_before(
        "        self._shrink(seq, n)\n        self.counts[seq] = [n]",
        "        n = self.length(seq) - n\n",
    ),
)
def truncate_drops_n(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.truncate(twin.add(5), 2)
        twin.check()


@trap(
    catches="the copy of a shared page stops one row short",
    severity="critical",
    story="An off-by-one error: the last position before the fork is not copied.",
    seen=BLIND,
    control=never_forked,
    mutant=insert_after(
        "            table[i] = self._own_copy(table[i])\n",
        "            for pool in self.pools:\n"
        "                pool[:, table[i], start % self.page_size - 1] = 0\n",
    ),
)
def copy_misses_a_row(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        child = twin.fork(twin.add(3))
        twin.append(child, 1)
        twin.check()


@trap(
    catches="a shared page is replaced by an empty one before it is written to",
    severity="major",
    story="A page is taken in place of the shared one, and nothing is copied.",
    control=never_forked,
    mutant=edit("            pool[:, copy] = pool[:, page]\n", "            pool[:, copy] = 0\n"),
)
def copy_is_empty(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED, layers=1):
        child = twin.fork(twin.add(3))
        twin.append(child, 1)
        twin.check()


@trap(
    catches="before a write only the first of the shared pages that it touches is copied",
    severity="major",
    story="A layer that lags behind by more than a page writes the others in place.",
    seen=BLIND,
    control=never_forked,
    mutant=edit("i for i in written if self.holders", "i for i in written[:1] if self.holders"),
)
def only_the_first_page_copied(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PAGED):
        seq = twin.add(1)
        twin.append(seq, 9, [0])
        child = twin.fork(seq)
        twin.append(child, 9, [1])
        twin.append(seq, 9, [1])
        twin.check()


@trap(
    catches="keep of no positions keeps all of them",
    severity="major",
    story="`if not indices: return` takes an empty list for nothing to do.",
    mutant=insert_after(
        "        indices = self._check_indices(seq, indices)\n",
        "        if not len(indices):\n            return\n",
    ),
)
def keep_of_nothing_keeps_all(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.keep(twin.add(3), [])
        twin.check()


@trap(
    catches="fork answers the number of its parent",
    severity="major",
    story="The new sequence is made, and the old number returned.",
    mutant=edit(
        "        self._share(seq, child)\n        return child\n",
        "        self._share(seq, child)\n        return seq\n",
    ),
)
def fork_answers_its_parent(submission: Submission, rng: Rng) -> None:
    for twin in twins(submission, rng, PLAIN, layers=1):
        twin.fork(twin.add(2))
        twin.check()
