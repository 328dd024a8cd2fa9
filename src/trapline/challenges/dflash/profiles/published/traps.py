"""Bugs of one cycle of verification."""

from trapline.arena.judge.traps import edit, edits, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.dflash.profiles.published.cases import (
    VOCABULARY,
    Rng,
    Target,
    appended,
    check_mask,
    draft,
    prompt_of,
)

PUBLISHED = "a published answer to this prompt"
_ROW = "int(logits[row].argmax()):\n"
_SKIP = "        if tree_parents[node] != last:\n            continue\n"
_ACCEPT = "            accepted.append(token)\n            last, row = node, len(prompt) + node\n"
_RETURN = "    return [*accepted, int(logits[row].argmax())]\n"
#: A walk in the order of the nodes that stops at the first refusal and keeps every match.
_EVERY = (
    (
        _SKIP,
        "        row = len(prompt) + tree_parents[node] if tree_parents[node] >= 0 else -1\n"
        "        row = row if row >= 0 else len(prompt) - 1\n",
    ),
)


def chain(submission: Submission, rng: Rng) -> None:
    """A right chain, where order and depth say the same."""
    target, prompt = Target(rng), prompt_of(rng, 3)
    appended(submission, target, prompt, draft(rng, target, prompt, [-1, 0, 1], 1.0))


def one_wrong_root(submission: Submission, rng: Rng) -> None:
    target, prompt = Target(rng), prompt_of(rng, 3)
    wrong = (target.greedy(prompt, 1)[0] + 1) % VOCABULARY
    appended(submission, target, prompt, ([wrong], [-1]))


@trap(
    catches="a node is judged by its own row instead of its parent's",
    severity="critical",
    story="The row of a position says what follows it. The prompt's pseudo-code says otherwise, "
    "and its golden test contradicts the pseudo-code.",
    mutant=edits(
        (_ROW, "int(logits[len(prompt) + node].argmax()):\n"),
        (
            _RETURN,
            "    if not accepted and tree_tokens:\n"
            "        return [int(logits[len(prompt)].argmax())]\n" + _RETURN,
        ),
    ),
)
def judged_by_its_own_row(submission: Submission, rng: Rng) -> None:
    for _ in range(4):
        one_wrong_root(submission, rng)


@trap(
    catches="a sibling of an accepted node is refused, and the accepted token said again",
    severity="critical",
    story="Every node is judged in its order, also those beside the accepted path; the refusal of "
    "one appends the model's choice, which the path already holds.",
    mutant=edits(
        (_RETURN, "    return accepted\n"),
        *_EVERY,
        (
            _ACCEPT,
            "            accepted.append(token)\n            continue\n"
            "        return [*accepted, int(logits[row].argmax())]\n",
        ),
    ),
    seen=PUBLISHED,
    control=chain,
)
def sibling_refused_after_acceptance(submission: Submission, rng: Rng) -> None:
    for _ in range(3):
        target, prompt = Target(rng), prompt_of(rng, 3)
        best = target.greedy(prompt, 1)[0]
        appended(submission, target, prompt, ([best, (best + 1) % VOCABULARY], [-1, -1]))


@trap(
    catches="node i is judged by the row before it, whatever its parent is",
    severity="critical",
    story="Right for a chain, where the position before a node is its parent's.",
    mutant=edits(
        (_RETURN, "    return accepted\n"),
        (_SKIP, "        row = len(prompt) + node - 1\n"),
        (
            _ACCEPT,
            "            accepted.append(token)\n            continue\n"
            "        return [*accepted, int(logits[row].argmax())]\n",
        ),
    ),
    seen=PUBLISHED,
    control=chain,
)
def judged_by_the_row_before(submission: Submission, rng: Rng) -> None:
    # The second root holds the second token: it follows the first by its place, not by its parent.
    for _ in range(4):
        target, prompt = Target(rng), prompt_of(rng, 3)
        first, second = target.greedy(prompt, 2)
        guess = int(target.row([*prompt, second]).argmax())
        appended(submission, target, prompt, ([first, second, guess], [-1, -1, 1]))


@trap(
    catches="a node is judged by the row that a chain has at its depth, whatever its parent is",
    severity="critical",
    story="Nodes of one depth share a row of logits: right where the tree is a chain.",
    mutant=edit(
        "last, row = node, len(prompt) + node\n",
        "last, row = node, len(prompt) + len(accepted) - 1\n",
    ),
    seen=PUBLISHED,
    control=chain,
)
def judged_by_depth(submission: Submission, rng: Rng) -> None:
    # The second root is right: what follows it stands in its own row, not in the first root's.
    for _ in range(4):
        target, prompt = Target(rng), prompt_of(rng, 3)
        first, second = target.greedy(prompt, 2)
        wrong = (first + 1) % VOCABULARY
        appended(submission, target, prompt, ([wrong, first, second], [-1, -1, 1]))


@trap(
    catches="descendants of a refused node are accepted",
    severity="critical",
    story="Only the node itself is refused, and its children are judged by rows that it shaped.",
    mutant=edit(
        _SKIP,
        "        if tree_parents[node] not in (last, node - 1):\n"
        "            continue\n        row = len(prompt) + tree_parents[node] if "
        "tree_parents[node] >= 0 else len(prompt) - 1\n",
    ),
    control=chain,
)
def orphans_accepted(submission: Submission, rng: Rng) -> None:
    for _ in range(4):
        target, prompt = Target(rng), prompt_of(rng, 3)
        wrong = (target.greedy(prompt, 1)[0] + 1) % VOCABULARY
        child = int(target.row([*prompt, wrong]).argmax())
        appended(submission, target, prompt, ([wrong, child], [-1, 0]))


@trap(
    catches="nothing is appended when the whole tree is refused",
    severity="critical",
    story="The model's own choice at the refusal is thrown away: the loop never ends.",
    mutant=edit(_RETURN, "    return accepted\n"),
    control=chain,
)
def nothing_appended(submission: Submission, rng: Rng) -> None:
    one_wrong_root(submission, rng)


@trap(
    catches="the last token comes from the last row instead of the end of the accepted path",
    severity="critical",
    story="logits[-1] is a habit from decoding without a tree.",
    mutant=edit(_RETURN, _RETURN.replace("logits[row]", "logits[-1]")),
)
def token_of_the_last_row(submission: Submission, rng: Rng) -> None:
    for _ in range(3):
        one_wrong_root(submission, rng)


@trap(
    catches="the tree's mask is causal: nodes see siblings and other branches",
    severity="critical",
    story="A lower triangle is the mask of a chain.",
    mutant=edit(
        "    mask[prompt_len:, :prompt_len] = True\n",
        "    mask[prompt_len:] = np.tri(total, dtype=bool)[prompt_len:]\n",
    ),
    control=chain,
)
def siblings_visible(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    check_mask(submission, 2, [-1, -1, 0])


@trap(
    catches="a node sees its parent, but no ancestor before it",
    severity="critical",
    story="Ancestors are followed one step instead of to the root.",
    mutant=edit("mask[row] |= mask[prompt_len + parent]", "mask[row, prompt_len + parent] = True"),
)
def grandparents_hidden(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    check_mask(submission, 2, [-1, 0, 1])


@trap(
    catches="prompt tokens see the whole prompt",
    severity="critical",
    story="The prompt's block is filled instead of its lower triangle.",
    mutant=edit("np.tri(prompt_len, dtype=bool)", "True"),
)
def prompt_not_causal(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    check_mask(submission, 4, [-1])


@trap(
    catches="a node does not see itself",
    severity="critical",
    story="Only ancestors are marked.",
    mutant=edit("        mask[row, row] = True\n", ""),
)
def node_blind_to_itself(submission: Submission, rng: Rng) -> None:  # noqa: ARG001
    check_mask(submission, 2, [-1, 0])
