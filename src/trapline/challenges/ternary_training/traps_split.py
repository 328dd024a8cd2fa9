"""Bugs of the split by documents."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.solution_lines import BLIND


def _held_out(submission: Submission, documents: list[text.Document], fraction: float) -> set[int]:
    _, valid = submission.split(documents, fraction)
    return {int(index) for index in valid}


def _half(submission: Submission, rng: np.random.Generator) -> None:
    """A fraction of one half of a hundred documents."""
    train, valid = submission.split(text.noise(rng, 50, 100, 8), 0.5)
    expect.equal(sorted([*map(int, train), *map(int, valid)]), list(range(100)), "both sides")


def _same_sides(before: set[int], after: set[int], when: str) -> None:
    """The message counts documents: which ones they are is free, and differs in every answer."""
    moved = len(before ^ after)
    expect.that(not moved, f"{moved} documents change sides {when}")


@trap(
    catches="copies of one document are assigned to both sides",
    severity="critical",
    story="A perplexity on validation text that was also trained on is too good.",
    mutant=edit(
        "    sides = [_draw(document) < fraction for document in documents]\n",
        "    sides = [_draw([index]) < fraction for index, _ in enumerate(documents)]\n",
    ),
    seen=BLIND,
)
def equal_documents_parted(submission: Submission, rng: np.random.Generator) -> None:
    once = text.noise(rng, 50, 60, 8)
    held_out = _held_out(submission, [*once, *reversed(once), *once], 0.5)
    for index in range(60):
        sides = {place in held_out for place in (index, 119 - index, 120 + index)}
        expect.that(len(sides) == 1, f"document {index} and its copies are on both sides")


@trap(
    catches="the split changes with every process (a salted hash)",
    severity="critical",
    story="Python salts the hash of strings: after a restart, former validation text is trained "
    "on.",
    mutant=edit(
        "    digest = hashlib.sha256(text.encode()).digest()\n"
        '    return int.from_bytes(digest[:6], "big") / 2.0**48\n',
        "    return (hash(text) % 2**48) / 2.0**48\n",
    ),
    seen=BLIND,
)
def split_by_process(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 120, 8)
    here = submission.split(documents, 0.5)
    there = submission.fresh().split(documents, 0.5)
    same = list(map(list, there)) == list(map(list, here))
    expect.that(same, "another process splits the documents in another way")


@trap(
    catches="a document's side depends on its position in the list",
    severity="major",
    story="A shuffle with a fixed seed is repeatable until a file is added at the front.",
    mutant=edit(
        "    sides = [_draw(document) < fraction for document in documents]\n",
        "    first = {}\n"
        "    for index, document in enumerate(documents):\n"
        "        first.setdefault(tuple(document), index)\n"
        "    sides = [_draw([first[tuple(document)]]) < fraction for document in documents]\n",
    ),
    seen=BLIND,
)
def split_by_place(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 120, 8)
    order = rng.permutation(120)
    held_out = _held_out(submission, documents, 0.5)
    moved = _held_out(submission, [documents[i] for i in order], 0.5)
    _same_sides(held_out, {int(order[i]) for i in moved}, "after a shuffle")


@trap(
    catches="adding documents moves others to the other side",
    severity="major",
    story="Ranking by hash and taking the first n per cent: with more text, former validation text "
    "is trained on.",
    mutant=edit(
        "    sides = [_draw(document) < fraction for document in documents]\n",
        "    draws = [_draw(document) for document in documents]\n"
        "    ranked = sorted(set(draws))\n"
        "    held = set(ranked[: round(fraction * len(ranked))])\n"
        "    sides = [draw in held for draw in draws]\n",
    ),
    seen=BLIND,
)
def split_by_company(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 200, 8)
    few = _held_out(submission, documents[:101], 0.5)
    many = _held_out(submission, documents, 0.5)
    _same_sides(few, {i for i in many if i < 101}, "when others are added")
    alone = {i for i in range(40) if _held_out(submission, [documents[i]], 0.5)}
    _same_sides({i for i in few if i < 40}, alone, "when each is alone")


@trap(
    catches="the fraction is taken as the training share",
    severity="critical",
    story="split(documents, 0.1) then holds out nine tenths, and the loss still looks honest.",
    mutant=edit("< fraction for document in documents", ">= fraction for document in documents"),
    seen=BLIND,
)
def fraction_upside_down(submission: Submission, rng: np.random.Generator) -> None:
    count = len(_held_out(submission, text.noise(rng, 50, 400, 8), 0.1))
    # 400 draws of 0.1: more than 80 happen less than once in 10⁸ runs.
    expect.that(1 <= count <= 80, f"{count} of 400 documents held out at fraction 0.1")


@trap(
    catches="documents with the same beginning are always assigned to the same side",
    severity="major",
    story="With the same licence text at the top, hashing the first tokens makes all files one "
    "document.",
    mutant=edit("for token in document)\n    digest", "for token in document[:16])\n    digest"),
    seen=BLIND,
)
def only_the_beginning_hashed(submission: Submission, rng: np.random.Generator) -> None:
    opening = text.noise(rng, 50, 1, 200)[0]
    documents = [opening + ending for ending in text.noise(rng, 50, 200, 8)]
    count = len(_held_out(submission, documents, 0.5))
    # 200 fair draws: outside 60 … 140 less than once in 10⁷ runs.
    expect.that(60 <= count <= 140, f"{count} of 200 documents with one opening held out")


@trap(
    catches="token ids above 255 break the split",
    severity="major",
    story="bytes(document) works for byte tokens and raises an error with any larger vocabulary.",
    mutant=edit("text.encode()", "bytes(list(document)) + text.encode()"),
)
def large_ids_refused(submission: Submission, rng: np.random.Generator) -> None:
    documents = [[int(t) for t in row] for row in rng.integers(256, 200_000, (20, 6))]
    documents += [[], [2**40, 3]]
    train, valid = submission.split(documents, 0.5)
    expect.equal(sorted([*map(int, train), *map(int, valid)]), list(range(22)), "both sides")


@trap(
    catches="token ids beyond 64 bits break the split",
    severity="minor",
    story="int.to_bytes(8) and int64 arrays raise an error where an id is a hash of 128 bits.",
    mutant=edit(
        "text.encode()",
        'b"".join(int(token).to_bytes(8, "little") for token in document) + text.encode()',
    ),
    seen=BLIND,
)
def ids_beyond_64_bits(submission: Submission, rng: np.random.Generator) -> None:
    documents = [[int(t), 2**64 + int(t), 2**90] for t in rng.integers(0, 200_000, 20)]
    train, valid = submission.split(documents, 0.5)
    expect.equal(sorted([*map(int, train), *map(int, valid)]), list(range(20)), "both sides")


@trap(
    catches="copies of a document are dropped from both sides",
    severity="major",
    story="Splitting a dict of unique texts drops the copies, and the corpus shrinks unnoticed.",
    mutant=edits(
        (
            "    train = [index for index, held_out in enumerate(sides) if not held_out]\n",
            "    first = {tuple(document): index for index, document in enumerate(documents)}\n"
            "    kept = set(first.values())\n"
            "    train = [i for i, held_out in enumerate(sides) if not held_out and i in kept]\n",
        ),
        (
            "    valid = [index for index, held_out in enumerate(sides) if held_out]\n",
            "    valid = [i for i, held_out in enumerate(sides) if held_out and i in kept]\n",
        ),
    ),
    seen=BLIND,
)
def copies_vanish(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 10, 8) * 3
    train, valid = submission.split(documents, 0.5)
    expect.equal(sorted([*map(int, train), *map(int, valid)]), list(range(30)), "both sides")


@trap(
    catches="split reorders the caller's documents",
    severity="major",
    story="After sorting in place the returned indices no longer refer to the caller's documents.",
    mutant=insert_before(
        "    sides = [_draw(document) < fraction for document in documents]\n",
        "    documents.sort()\n",
    ),
)
def documents_sorted(submission: Submission, rng: np.random.Generator) -> None:
    documents = [
        [int(t), *rest]
        for t, rest in zip(range(30, 0, -1), text.noise(rng, 50, 30, 5), strict=True)
    ]
    _, after = submission.observe("split", documents, 0.5)
    expect.equal(after[0], documents, "the documents after the call")


@trap(
    catches="a fraction of 0 or 1 is refused",
    severity="minor",
    story="The check leaves out the ends of the range.",
    mutant=edit("if not 0.0 <= fraction <= 1.0:", "if not 0.0 < fraction < 1.0:"),
    also=[
        edit("if not 0.0 <= fraction <= 1.0:", "if not 0.0 < fraction <= 1.0:"),
        edit("if not 0.0 <= fraction <= 1.0:", "if not 0.0 <= fraction < 1.0:"),
    ],
)
def whole_fraction_refused(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 50, 12, 6)
    for fraction, held_out in ((0, []), (1, list(range(12)))):
        _, valid = submission.split(documents, fraction)
        expect.equal([*map(int, valid)], held_out, f"what a fraction of {fraction} holds out")


def _drawn(draw: str) -> Mutant:
    """The number that decides a document's side, from the digest of its text."""
    return edit('int.from_bytes(digest[:6], "big") / 2.0**48', draw)


@trap(
    catches="the draw of a document can be 1, as a byte over 255 can: a fraction of 1 leaves "
    "documents in training",
    severity="minor",
    story="A whole number is divided by the largest one instead of by how many there are.",
    mutant=_drawn("digest[0] / 255"),
    also=[
        _drawn('int.from_bytes(digest, "big") % 100 / 99'),
        _drawn('int.from_bytes(digest, "big") % 101 / 100'),
    ],
    seen=BLIND,
    control=_half,
)
def draw_of_one(submission: Submission, rng: np.random.Generator) -> None:
    # 4000 draws of 256 numbers: all miss the largest less than once in 10⁶ runs.
    documents = text.noise(rng, 1000, 4000, 6)
    train, _ = submission.split(documents, 1.0)
    expect.that(not len(train), f"{'some' if len(train) < 200 else 'many'} documents left over")
