"""Bugs of the rounds of generate: where they end, what they count, what the models are given."""

import numpy as np

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import VOCABULARY, story_of
from trapline.challenges.dflash.solution_lines import BLOCK, LOOP
from trapline.challenges.dflash.traps_generating import ASKED, COUNT, FRESH, told

_ENDED = (
    (LOOP, LOOP.replace("eos_id not in output[-1:]", "not ended")),
    ("    passes = accepted = 0\n", "    passes = accepted = 0\n    ended = False\n"),
)


@trap(
    catches="an EOS that the target says itself, as the bonus, does not end the output",
    severity="major",
    story="Only drafted tokens are compared with EOS.",
    mutant=edits(
        *_ENDED,
        (
            FRESH,
            "        ended = eos_id in drafted\n"
            "        rest = [] if ended else [bonus]\n"
            "        fresh = [*until_end(drafted, eos_id), *rest][: limit - len(output)]\n",
        ),
    ),
)
def end_as_the_bonus(submission: Submission, rng: np.random.Generator) -> None:
    for drafts in (table.perfect_draft, table.hopeless_draft):
        told(submission, rng, drafts, 2, end=2, max_new_tokens=7, budget=2)


def _one_end(submission: Submission, rng: np.random.Generator) -> None:
    """The same branch with one EOS."""
    told(submission, rng, table.perfect_draft, 4, end=1, max_new_tokens=9, budget=4)


_UP_TO_THE_LAST_END = (
    "        fresh = [*drafted, bonus]\n"
    "        ends = [place for place, token in enumerate(fresh) if token == eos_id]\n"
    "        fresh = fresh[: ends[-1] + 1 if ends else None][: limit - len(output)]\n"
)


@trap(
    catches="a round with two EOS is cut behind the last one instead of the first",
    severity="major",
    story="The branch is searched from its end; text behind the end of the answer comes back.",
    mutant=edit(FRESH, _UP_TO_THE_LAST_END),
    control=_one_end,
)
def cut_at_the_last_end(submission: Submission, rng: np.random.Generator) -> None:
    for ends in ((1, 3), (0, 2), (1, 4)):
        prompt, script, eos, _ = story_of(rng)
        for place in ends:
            script[place] = eos
        law = table.scripted_law(VOCABULARY, prompt, script)
        draft = table.perfect_draft(law, 4, VOCABULARY)
        table.run(submission, law, draft, prompt, max_new_tokens=9, eos_id=eos, budget=4)


@trap(
    catches="an EOS as the first token of a round does not end the output",
    severity="major",
    story="The search for EOS begins behind the first token.",
    mutant=edits(
        *_ENDED,
        (
            FRESH,
            "        first, *rest = [*drafted, bonus]\n"
            "        fresh = [first, *until_end(rest, eos_id)][: limit - len(output)]\n"
            "        ended = eos_id in fresh[1:]\n",
        ),
    ),
)
def end_first_in_a_round(submission: Submission, rng: np.random.Generator) -> None:
    for drafts in (table.perfect_draft, table.hopeless_draft):
        told(submission, rng, drafts, 2, end=3, max_new_tokens=8, budget=2)


@trap(
    catches="`accepted` misses drafted tokens of the last round: its last token, or all of them",
    severity="minor",
    story="The last token of a round is taken for the bonus, also where EOS cut the bonus off; or "
    "the loop ends before it counts.",
    mutant=edit(COUNT, "        accepted += len(fresh) - 1\n"),
    also=[
        edit(
            COUNT,
            "        if len(output) + len(fresh) < limit and eos_id not in fresh:\n    " + COUNT,
        ),
        edit(COUNT, "        if bonus != eos_id:\n    " + COUNT),
    ],
)
def accepted_misses_the_last_round(submission: Submission, rng: np.random.Generator) -> None:
    for end in (1, 3, 5):
        settings = {"end": end, "max_new_tokens": 12, "budget": 4}
        told(submission, rng, table.perfect_draft, 3, compare=["accepted"], **settings)


def _wrapped(line: str, by: str) -> tuple[str, str]:
    return line, line.replace("prefix + output", f"{by}(prefix + output)")


@trap(
    catches="a model is given the prefix as an array or a tuple instead of a list of ints",
    severity="minor",
    story="The prefix is kept in the form that is handy inside; the models were promised a list.",
    mutant=edits(_wrapped(ASKED, "np.array")),
    also=[
        edits(_wrapped(BLOCK, "np.array")),
        edits(_wrapped(BLOCK, "np.array"), _wrapped(ASKED, "np.array")),
        edits(_wrapped(ASKED, "tuple")),
        edits(_wrapped(BLOCK, "tuple")),
    ],
)
def prefix_not_a_list(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, max_new_tokens=4, budget=2)
