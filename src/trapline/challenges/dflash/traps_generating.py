"""Bugs of the generation loop."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_after, insert_before, trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    WRITTEN,
    rising,
    story_of,
)
from trapline.challenges.dflash.solution_lines import BLOCK, LOOP

# Parts of the gold solution that several mutants edit.
ASKED = "        answer = target.tree_log_probs(prefix + output, tokens, parents)\n"
_JUDGED = "        path, bonus = verify_tree(tokens, parents, choices)\n"
FRESH = "        fresh = until_end([*drafted, bonus], eos_id)[: limit - len(output)]\n"
COUNT = "        accepted += min(len(drafted), len(fresh))\n"
OUTPUT = "    return output, {"
_COUNTED = "        passes += 1\n"
_AT_AN_END = "eos_id not in output[-1:]"


def told(
    submission: Submission,
    rng: np.random.Generator,
    drafts: Callable[..., Callable[[table.Prefix], np.ndarray]],
    depth: int,
    *,
    end: int | None = None,
    **settings: Any,
) -> table.Generated:
    """A story, generated with these drafts and compared; its token number `end` may be the EOS."""
    prompt, script, eos, law = story_of(rng)
    if end is not None:
        script[end] = eos
        law = table.scripted_law(VOCABULARY, prompt, script)
    draft = drafts(law, depth, VOCABULARY)
    return table.run(submission, law, draft, prompt, eos_id=eos, **settings)


@trap(
    catches="drafted tokens are accepted without verification",
    severity="major",
    story="Fast and wrong: the output is the drafter's.",
    mutant=insert_after(_JUDGED, "        path = [] if not len(tokens) else [0]\n"),
)
def drafts_not_verified(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 3, max_new_tokens=6, budget=4)


@trap(
    catches="the next pass continues from the bonus without the accepted tokens before it",
    severity="major",
    story="Cache and text drift apart after the first accepted draft.",
    mutant=edits(
        (ASKED, ASKED.replace("prefix + output", "prefix + bonuses")),
        (BLOCK, BLOCK.replace("prefix + output", "prefix + bonuses")),
        ("    passes = accepted = 0\n", "    passes = accepted = 0\n    bonuses = []\n"),
        ("        output += fresh\n", "        output += fresh\n        bonuses.append(bonus)\n"),
    ),
)
def committed_prefix_wrong(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=9, budget=2)


@trap(
    catches="the target is given the prefix without its last token",
    severity="major",
    story="The root belongs to the prefix that the target sees, and not to the tree.",
    mutant=edit(ASKED, ASKED.replace("prefix + output", "(prefix + output)[:-1]")),
    seen=WRITTEN,
)
def prefix_without_root(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=4, budget=2)


@trap(
    catches="the drafter is given the prompt again instead of what has been generated",
    severity="major",
    story="Accepted tokens never reach the drafter: the output is right, and the acceptance rate "
    "drops.",
    mutant=edit(BLOCK, BLOCK.replace("prefix + output", "prefix")),
    seen=WRITTEN,
)
def drafter_left_behind(submission: Submission, rng: np.random.Generator) -> None:
    got = told(submission, rng, table.perfect_draft, 2, max_new_tokens=9, budget=2)
    expect.equal(got.draft_prefixes[:3], got.target_prefixes[:3], "what the drafter was shown")


@trap(
    catches="after accepted drafts the target's own next token is not used",
    severity="major",
    story="The token is computed again in the next pass: the output is right, and one pass is "
    "wasted each time.",
    mutant=edit(FRESH, FRESH.replace("[*drafted, bonus]", "drafted or [bonus]")),
    seen=WRITTEN,
)
def bonus_thrown_away(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=9, budget=2)


@trap(
    catches="an EOS that was drafted and accepted does not end the output",
    severity="critical",
    story="Only the last token of a round, the bonus, is compared with EOS.",
    mutant=edit(FRESH, "        fresh = [*drafted, bonus][: limit - len(output)]\n"),
    seen=WRITTEN,
)
def end_inside_a_branch(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 3, end=1, max_new_tokens=10, budget=4)


@trap(
    catches="an EOS as the very first token does not end the generation",
    severity="major",
    story="A stop test that begins at the second token.",
    mutant=edit(LOOP, LOOP.replace("output[-1:]", "output[1:]")),
)
def end_at_once(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    script[0] = eos
    law = table.scripted_law(VOCABULARY, prompt, script)
    for draft in (
        table.perfect_draft(law, 2, VOCABULARY),
        table.hopeless_draft(law, 1, VOCABULARY),
    ):
        table.run(submission, law, draft, prompt, max_new_tokens=5, eos_id=eos, budget=2)


@trap(
    catches="more than max_new_tokens come back",
    severity="critical",
    story="A whole branch is appended before the length is tested.",
    mutant=edit(FRESH, "        fresh = until_end([*drafted, bonus], eos_id)\n"),
    seen=WRITTEN,
)
def runs_past_the_limit(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    for limit in (1, 3, 6):
        table.run(submission, law, draft, prompt, max_new_tokens=limit, eos_id=eos, budget=4)


@trap(
    catches="`accepted` counts drafted tokens that are not in the output",
    severity="major",
    story="Acceptance figures that include tokens behind the end overstate the drafter.",
    mutant=edit(COUNT, "        accepted += len(drafted)\n"),
    also=[
        edit(COUNT, "        accepted += len(until_end(drafted, eos_id))\n"),
        edit(COUNT, "        accepted += len(drafted[: limit - len(output)])\n"),
    ],
    seen=WRITTEN,
)
def accepted_counts_what_was_cut(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    script[1] = eos
    law = table.scripted_law(VOCABULARY, prompt, script)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    table.run(
        submission,
        law,
        draft,
        prompt,
        compare=["accepted"],
        max_new_tokens=10,
        eos_id=eos,
        budget=4,
    )
    table.run(
        submission, law, draft, prompt, compare=["accepted"], max_new_tokens=1, eos_id=eos, budget=4
    )


@trap(
    catches="`accepted` counts the target's own tokens",
    severity="major",
    story="Figures with and without the bonus differ by one per pass and are often compared.",
    mutant=edit(COUNT, "        accepted += len(fresh)\n"),
    seen=WRITTEN,
)
def accepted_counts_the_bonus(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 2, compare=["accepted"], max_new_tokens=4, budget=3)


@trap(
    catches="`target_passes` is not the number of calls of the target",
    severity="minor",
    story="One pass is added for a prefill that does not happen, or one is counted per token or "
    "node; or only those are counted that accept something.",
    mutant=edit("    passes = accepted = 0\n", "    passes, accepted = 1, 0\n"),
    also=[
        edit(_COUNTED, "        passes += 2\n"),
        edit(_COUNTED, "        passes += len(tokens) + 1\n"),
        edit(_COUNTED, "        passes += len(tokens)\n"),
        edit("    passes = accepted = 0\n", "    passes, accepted = -1, 0\n"),
        edit(_COUNTED, ""),
        edits((_COUNTED, ""), (FRESH, FRESH + "        passes += bool(path)\n")),
    ],
)
def passes_miscounted(submission: Submission, rng: np.random.Generator) -> None:
    for drafts in (table.perfect_draft, table.hopeless_draft):
        settings = {"max_new_tokens": 8, "budget": 3}
        told(submission, rng, drafts, 3, compare=["target_passes"], **settings)


@trap(
    catches="of two equally likely tokens the target's pick is the higher one",
    severity="minor",
    story="A sort instead of an argmax.",
    mutant=edit("log_probs.argmax", "log_probs.shape[1] - 1 - log_probs[:, ::-1].argmax"),
    seen=WRITTEN,
)
def tie_higher_token_said(submission: Submission, rng: np.random.Generator) -> None:
    low, high = rising(rng, 2)
    eos = next(token for token in range(VOCABULARY) if token not in (low, high))

    def law(prefix: table.Prefix) -> np.ndarray:
        values = np.full(VOCABULARY, -6.0)
        values[[low, high]] = -1.0 - len(prefix) / 8
        return values

    draft = table.hopeless_draft(law, 1, VOCABULARY)
    got = table.run(submission, law, draft, [high], max_new_tokens=3, eos_id=eos, budget=2)
    expect.equal(got.tokens, [low] * 3, "the output")


@trap(
    catches="the EOS token is missing from the output",
    severity="major",
    story="The contract includes the EOS token in the output.",
    mutant=insert_before(OUTPUT, "    output = [t for t in output if t != eos_id]\n"),
    seen=WRITTEN,
)
def end_left_out(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, end=3, max_new_tokens=10, budget=2)


@trap(
    catches="the output begins with the prompt",
    severity="major",
    story="Generation interfaces differ in this; the contract says without.",
    mutant=edit(OUTPUT, "    return prefix + output, {"),
)
def prompt_in_the_output(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, max_new_tokens=4, budget=2)


def _one_round(searched: str, answer: str = "output") -> Mutant:
    """After each round EOS is looked for in this part of the prompt, too."""
    return edits(
        (LOOP, LOOP.replace(_AT_AN_END, f"not (output and eos_id in {searched} + output)")),
        (OUTPUT, f"    output = {answer}\n{OUTPUT}"),
    )


@trap(
    catches="an EOS in the prompt counts as generated: nothing follows it, or one round alone",
    severity="major",
    story="Chat prompts have end-of-turn tokens, usually one at their end.",
    mutant=edit(LOOP, LOOP.replace("output[-1:]", "(prefix + output)[-1:]")),
    also=[
        edit(LOOP, LOOP.replace("output[-1:]", "prefix + output")),
        _one_round("prefix"),
        _one_round("prefix[-1:]"),
        # The text is cut behind its first EOS before the prompt is taken off.
        _one_round("prefix", "until_end(prefix + output, eos_id)[len(prefix) :]"),
        _one_round("prefix[-1:]", "until_end(prefix[-1:] + output, eos_id)[1:]"),
    ],
    seen=WRITTEN,
)
def end_in_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    for with_end in ((*prompt, eos), (eos, *prompt)):
        law = table.scripted_law(VOCABULARY, with_end, script)
        draft = table.perfect_draft(law, 2, VOCABULARY)
        table.run(submission, law, draft, with_end, max_new_tokens=5, eos_id=eos, budget=2)


@trap(
    catches="generated tokens are appended to the caller's prompt",
    severity="major",
    story="`prefix = prompt` is a second name, not a copy.",
    mutant=insert_before(OUTPUT, "    prompt.extend(output)\n"),
    seen=WRITTEN,
)
def generating_modifies_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)

    def rows(prefix: Any, tokens: Any, parents: Any) -> np.ndarray:
        branches: list[tuple[int, ...]] = [tuple(prefix)]
        for token, parent in zip(np.asarray(tokens), np.asarray(parents), strict=True):
            branches.append((*branches[int(parent) + 1], int(token)))
        return np.stack([law(branch) for branch in branches])

    target, drafter = Stub(tree_log_probs=rows), Stub(block=lambda prefix: draft(tuple(prefix)))
    settings = {"max_new_tokens": 5, "eos_id": eos, "budget": 2}
    _, after = submission.observe("generate", target, drafter, list(prompt), **settings)
    expect.equal(after[2], list(prompt), "the prompt after the call")


@trap(
    catches="a second call continues where the first one ended",
    severity="major",
    story="State in a mutable default argument or a module variable.",
    mutant=edits(
        ("    output = []\n", "    output = KEPT\n"),
        ("def until_end(", "KEPT = []\n\n\ndef until_end("),
    ),
    keeps_state=True,
)
def text_kept_between_calls(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    for limit in (4, 4, 2):
        table.run(submission, law, draft, prompt, max_new_tokens=limit, eos_id=eos, budget=2)


@trap(
    catches="the target is called again although the output is complete",
    severity="minor",
    story="The stop test comes one call too late; the extra pass costs time and is discarded.",
    mutant=insert_before(
        OUTPUT, "    target.tree_log_probs(prefix + output, tokens, parents)\n    passes += 1\n"
    ),
)
def pass_after_the_end(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, law = story_of(rng)
    draft = table.hopeless_draft(law, 2, VOCABULARY)
    table.run(
        submission, law, draft, prompt, compare=["passes"], max_new_tokens=3, eos_id=eos, budget=2
    )
    script[2] = eos
    ending = table.scripted_law(VOCABULARY, prompt, script)
    table.run(
        submission,
        ending,
        table.hopeless_draft(ending, 2, VOCABULARY),
        prompt,
        compare=["passes"],
        max_new_tokens=9,
        eos_id=eos,
        budget=2,
    )


@trap(
    catches="max_new_tokens of 0 generates a token or calls a model",
    severity="minor",
    story="The loop tests its condition at the end.",
    mutant=edits(
        (LOOP, LOOP.replace("len(output) < limit", "(not output or len(output) < limit)")),
        (FRESH, FRESH.replace("limit - len(output)", "max(limit, 1) - len(output)")),
    ),
    also=[edit(LOOP, LOOP.replace("len(output) < limit", "(not passes or len(output) < limit)"))],
    seen=WRITTEN,
)
def nothing_to_generate(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=0, budget=2)


@trap(
    catches="the target is given more nodes than the budget allows",
    severity="major",
    story="The budget bounds the cost of verification; a pass with more nodes is slower.",
    mutant=edit(BLOCK, BLOCK.replace(", budget)", ", budget + 1)")),
)
def budget_ignored_by_generate(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.noisy_draft(int(rng.integers(2**31)), law, 2, VOCABULARY)
    for budget in (0, 1, 5):
        table.run(
            submission,
            law,
            draft,
            prompt,
            compare=["nodes"],
            max_new_tokens=5,
            eos_id=eos,
            budget=budget,
        )


@trap(
    catches="a drafter without a proposal ends the generation",
    severity="major",
    story="A tree without nodes still yields one token per pass.",
    mutant=insert_after(BLOCK, "        if not len(tokens):\n            break\n"),
    seen=WRITTEN,
)
def empty_block_gives_up(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)

    def silent(prefix: table.Prefix) -> np.ndarray:  # noqa: ARG001 - it has nothing to say
        return np.zeros((0, VOCABULARY))

    table.run(submission, law, silent, prompt, max_new_tokens=4, eos_id=eos, budget=3)
    impossible = np.full((2, VOCABULARY), -np.inf)
    table.run(submission, law, lambda _: impossible, prompt, max_new_tokens=3, eos_id=eos, budget=3)


@trap(
    catches="generate verifies the most likely chain instead of the tree",
    severity="major",
    story="The tree is implemented and tested, but generate does not use it.",
    mutant=edit(
        BLOCK,
        "        block = drafter.block(prefix + output)[:budget]\n"
        "        tokens = block.argmax(axis=1)\n"
        "        parents = np.arange(len(tokens)) - 1\n",
    ),
)
def only_the_chain_is_drafted(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, law = story_of(rng)

    def second_best(prefix: table.Prefix) -> np.ndarray:
        """The right token is the second choice at every position."""
        done = len(prefix) - len(prompt)
        log_q = np.full((2, VOCABULARY), -9.0)
        for depth in range(2):
            right = script[done + depth] if done + depth < len(script) else 0
            log_q[depth, right] = -1.0
            log_q[depth, (right + 1) % VOCABULARY] = -0.5
        return log_q

    table.run(
        submission,
        law,
        second_best,
        prompt,
        compare=["passes"],
        max_new_tokens=6,
        eos_id=eos,
        budget=6,
    )
