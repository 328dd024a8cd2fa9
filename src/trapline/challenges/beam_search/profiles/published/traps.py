"""Bugs of a beam search whose finished and live beams share the places."""

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.beam_search.profiles.published.cases import (
    EOS,
    Rng,
    check,
    random_model,
    scripted,
    settings,
)

PUBLISHED = "a published answer to this prompt"
_ENDED = "token == eos_id"
_POOL = "pool = [beam for beam in beams if beam.ended]"
_TOTAL = "beam.total + float(row[token])"
_LENGTH = "length = len(self.tokens)"


def nothing_ends(submission: Submission, rng: Rng) -> None:
    """The same search without an end in reach."""
    check(submission, random_model(rng, 12, -25.0), [[1, 2]], **settings())


@trap(
    catches="the end token costs nothing: its log-probability is not added",
    severity="critical",
    story="The sum is frozen before the end is added, so that every end beats every other token.",
    mutant=edit(_TOTAL, f"beam.total + float(row[token]) * ({_ENDED.replace('==', '!=')})"),
    seen=PUBLISHED,
    control=nothing_ends,
)
def end_costs_nothing(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {2: 0.0, 3: -0.5}, (1, 2): {4: 0.0, EOS: -3.0}, (1, 3): {5: 0.0, EOS: -4.0}}
    check(submission, scripted(20, script), [[1]], **settings(2, 2, 0.0))


@trap(
    catches="finished beams leave the places and join the result at the end",
    severity="critical",
    story="Freed places go to beams that would have lost, and those may win in the end.",
    mutant=edits(
        ("    beams = [Beam((), 0.0, False)]\n", "    beams, done = [Beam((), 0.0, False)], []\n"),
        (_POOL, "pool = []"),
        (
            "        beams = pool[:width]\n",
            "        done += [b for b in pool[:width] if b.ended]\n"
            "        beams = [b for b in pool[:width] if not b.ended]\n",
        ),
        ("ranked = sorted(beams,", "ranked = sorted(done + beams,"),
        ("for beam in ranked if beam.tokens]", "for beam in ranked if beam.tokens][:width]"),
    ),
    seen=PUBLISHED,
    control=nothing_ends,
)
def finished_beams_leave(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    # The end takes one of two places; both continuations of the other are likely at its length.
    script = {(1,): {EOS: 0.0, 2: -0.2, 3: -5.0}, (1, 2): {4: 0.0, 5: -0.3}}
    script |= {(1, 2, 4): {6: 0.0, 7: -0.1}, (1, 2, 5): {8: 0.0}}
    for steps in (2, 3):
        check(submission, scripted(20, script), [[1]], **settings(2, steps, 0.0))


@trap(
    catches="finished beams are dropped: an early end is lost",
    severity="critical",
    story="Only live beams are carried to the next step.",
    mutant=edit(_POOL, "pool = []"),
    control=nothing_ends,
)
def finished_beams_dropped(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {EOS: 0.0, 2: -1.0}, (1, 2): {3: -1.0, 4: -1.1, 5: 0.0}}
    check(submission, scripted(20, script), [[1]], **settings(2, 2, 0.0))


@trap(
    catches="the end token does not count for the length",
    severity="major",
    story="The length of a finished beam is that of its text.",
    mutant=edit(_LENGTH, "length = max(len(self.tokens) - self.ended, 1)"),
    control=nothing_ends,
)
def end_not_counted(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {2: 0.0, 3: -1.0}, (1, 2): {EOS: 0.0, 4: -0.1}}
    check(submission, scripted(20, script), [[1]], **settings(2, 2, 1.0))


@trap(
    catches="the sum that is carried on is already divided by the length penalty",
    severity="critical",
    story="The penalty is for ranking; a score kept as the sum is penalised again and again.",
    mutant=edits(
        (
            "        beams = pool[:width]\n",
            "        beams = [\n            beam if beam.ended else "
            "Beam(beam.tokens, beam.score(penalty), False)\n            for beam in pool[:width]\n"
            "        ]\n",
        ),
    ),
)
def penalty_accumulates(submission: Submission, rng: Rng) -> None:
    check(submission, random_model(rng, 12, -3.0), [[1, 2]], **settings(2, 4, 1.0))


@trap(
    catches="finished beams are continued beyond their end",
    severity="critical",
    story="The flag is set and never looked at.",
    mutant=edits(
        ("live = [beam for beam in beams if not beam.ended]", "live = beams"),
        (_POOL, "pool = []"),
    ),
    control=nothing_ends,
)
def finished_beams_continued(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {EOS: 0.0, 2: -1.0}, (1, 2): {3: 0.0}, (1, EOS): {4: 0.0}}
    check(submission, scripted(20, script), [[1]], **settings(2, 3, 0.6))


@trap(
    catches="places are given by the sum alone; the penalty only orders the result",
    severity="major",
    story="A longer beam has a lower sum: finished beams then always win against live ones.",
    mutant=edit(
        "pool.sort(key=lambda beam: -beam.score(penalty))",
        "pool.sort(key=lambda beam: -beam.total)",
    ),
    control=nothing_ends,
)
def places_by_sum(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {EOS: 0.0, 2: 0.1}, (1, 2): {3: 0.0, 4: -0.01}}
    check(submission, scripted(20, script), [[1]], **settings(2, 2, 2.0))


@trap(
    catches="the search stops at the first end",
    severity="major",
    story="One finished beam is taken for the end of the prompt.",
    mutant=edit("        if not live:\n", "        if not live or len(live) < len(beams):\n"),
    control=nothing_ends,
)
def stops_at_first_end(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {EOS: -1.0, 2: 0.0}, (1, 2): {3: 0.0}, (1, 2, 3): {4: 0.0}}
    check(submission, scripted(20, script), [[1]], **settings(2, 3, 0.6))


@trap(
    catches="the prompt counts for the length",
    severity="major",
    story="The length is that of the whole sequence.",
    mutant=edits(
        (
            "    def score(self, penalty: float) -> float:",
            "    offset = 0\n\n    def score(self, penalty: float) -> float:",
        ),
        (_LENGTH, "length = len(self.tokens) + Beam.offset"),
        (
            "    beams = [Beam((), 0.0, False)]\n",
            "    beams = [Beam((), 0.0, False)]\n    Beam.offset = len(prompt)\n",
        ),
    ),
)
def prompt_counts(submission: Submission, rng: Rng) -> None:
    check(submission, random_model(rng, 12, 0.5), [[1, 2, 3, 4]], **settings(2, 3, 1.0))


@trap(
    catches="beams that have not finished are dropped at the maximum length",
    severity="major",
    story="Only finished beams are returned.",
    mutant=edit("for beam in ranked if beam.tokens]", "for beam in ranked if beam.ended]"),
)
def unfinished_dropped(submission: Submission, rng: Rng) -> None:
    check(submission, random_model(rng, 12, -25.0), [[1]], **settings(2, 2))


@trap(
    catches="each beam is continued by its best token only",
    severity="major",
    story="K greedy searches side by side are not a beam search.",
    mutant=edit(
        "_continued(beam, row, 2 * width, eos_id)",
        "_continued(beam, row, 2 * width if beam is live[0] and not beam.tokens else 1, eos_id)",
    ),
)
def one_continuation_each(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {2: 0.0, 3: -6.0}, (1, 2): {4: 0.0, 5: -0.2}}
    check(submission, scripted(20, script), [[1]], **settings(2, 2))


@trap(
    catches="the end token is left out of the returned sequence",
    severity="minor",
    story="The prompt asks for the generated tokens, and the length counts the end.",
    mutant=edit(
        "return [(list(beam.tokens), beam.score(penalty)) for",
        "return [([t for t in beam.tokens if t != eos_id], beam.score(penalty)) for",
    ),
    control=nothing_ends,
)
def end_left_out(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    script = {(1,): {2: 0.0}, (1, 2): {EOS: 0.0, 3: -1.0}}
    check(submission, scripted(20, script), [[1]], **settings(2, 2))


@trap(
    catches="the result is ordered worst first",
    severity="major",
    story="A sort without reverse.",
    mutant=edit(
        "ranked = sorted(beams, key=lambda beam: -beam",
        "ranked = sorted(beams, key=lambda beam: beam",
    ),
)
def worst_first(submission: Submission, rng: Rng) -> None:
    check(submission, random_model(rng, 12), [[1]], **settings(3, 2))


@trap(
    catches="the first step starts from K equal beams",
    severity="major",
    story="All copies choose the same tokens: the result holds one answer several times.",
    mutant=edit(
        "    beams = [Beam((), 0.0, False)]\n", "    beams = [Beam((), 0.0, False)] * width\n"
    ),
)
def equal_beams_at_the_start(submission: Submission, rng: Rng) -> None:
    check(submission, random_model(rng, 12, -25.0), [[1]], **settings(3, 2))
