"""Bugs of the whole loop."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import trap
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.dflash import table
from trapline.challenges.dflash.situations import (
    VOCABULARY,
    refused,
    rising,
    story_of,
)


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
    "drafts-not-verified",
    catches="drafted tokens are taken as they come",
    severity="critical",
    story="Fast and wrong: the output is the drafter's.",
)
def drafts_not_verified(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 3, max_new_tokens=6, budget=4)


@trap(
    "committed-prefix-wrong",
    catches="the next pass continues from the bonus without the accepted tokens before it",
    severity="critical",
    story="Cache and text drift apart after the first accepted draft.",
)
def committed_prefix_wrong(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=9, budget=2)


@trap(
    "prefix-without-root",
    catches="the target is given the prefix without its last token",
    severity="critical",
    story="The root belongs to the prefix that the target sees, and not to the tree.",
)
def prefix_without_root(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=4, budget=2)


@trap(
    "drafter-left-behind",
    catches="the drafter is asked about the prompt again, not about what has been generated",
    severity="major",
    story="Accepted tokens that never reach the drafter: output right, acceptance gone.",
)
def drafter_left_behind(submission: Submission, rng: np.random.Generator) -> None:
    got = told(submission, rng, table.perfect_draft, 2, max_new_tokens=9, budget=2)
    expect.equal(got.draft_prefixes[:3], got.target_prefixes[:3], "what the drafter was shown")


@trap(
    "bonus-thrown-away",
    catches="after accepted drafts the target's own next token is not used",
    severity="major",
    story="It comes back in the next pass: the output is right and a pass is wasted each time.",
)
def bonus_thrown_away(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=9, budget=2)


@trap(
    "end-inside-a-branch",
    catches="tokens after an EOS in the middle of an accepted branch are kept",
    severity="critical",
    story="Only the last token of a round was compared with EOS.",
)
def end_inside(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 3, end=1, max_new_tokens=10, budget=4)


@trap(
    "end-at-once",
    catches="an EOS as the very first token does not end the generation",
    severity="critical",
    story="A stop test that begins at the second token.",
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
    "runs-past-the-limit",
    catches="more than max_new_tokens come back",
    severity="critical",
    story="A whole branch is appended before the length is tested.",
)
def past_the_limit(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 3, VOCABULARY)
    for limit in (1, 3, 6):
        table.run(submission, law, draft, prompt, max_new_tokens=limit, eos_id=eos, budget=4)


@trap(
    "accepted-counts-what-was-cut",
    catches="`accepted` counts drafted tokens that are not in the output",
    severity="major",
    story="Acceptance figures that include what lay behind the end flatter the drafter.",
)
def accepted_counts_cut(submission: Submission, rng: np.random.Generator) -> None:
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
    "accepted-counts-the-bonus",
    catches="`accepted` counts the target's own tokens",
    severity="major",
    story="Figures with and without the bonus differ by one a pass and are compared all the same.",
)
def accepted_counts_bonus(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.hopeless_draft, 2, compare=["accepted"], max_new_tokens=4, budget=3)


@trap(
    "passes-miscounted",
    catches="`target_passes` is not the number of calls of the target",
    severity="minor",
    story="A pass for a prefill that never happened, or one a token.",
)
def passes_miscounted(submission: Submission, rng: np.random.Generator) -> None:
    told(
        submission,
        rng,
        table.perfect_draft,
        3,
        compare=["target_passes"],
        max_new_tokens=8,
        budget=3,
    )


@trap(
    "tie-higher-token-said",
    catches="of two equally likely tokens the target's pick is the higher one",
    severity="minor",
    story="A sort in the place of an argmax.",
)
def tie_higher_said(submission: Submission, rng: np.random.Generator) -> None:
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
    "end-left-out",
    catches="the EOS token is missing from the output",
    severity="major",
    story="The contract ends at and includes it.",
)
def end_left_out(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, end=3, max_new_tokens=10, budget=2)


@trap(
    "prompt-in-the-output",
    catches="the output begins with the prompt",
    severity="major",
    story="Generation interfaces differ in this; the contract says without.",
)
def prompt_in_output(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, max_new_tokens=4, budget=2)


@trap(
    "end-in-the-prompt",
    catches="a prompt that ends with EOS generates nothing",
    severity="major",
    story="Chat prompts end with an end-of-turn token all the time.",
)
def end_in_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
    prompt, script, eos, _ = story_of(rng)
    prompt = (*prompt, eos)
    law = table.scripted_law(VOCABULARY, prompt, script)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    table.run(submission, law, draft, prompt, max_new_tokens=5, eos_id=eos, budget=2)


@trap(
    "generating-modifies-the-prompt",
    catches="generated tokens are appended to the caller's prompt",
    severity="major",
    story="`prefix = prompt` is a second name, not a copy.",
)
def modifies_the_prompt(submission: Submission, rng: np.random.Generator) -> None:
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
    "text-kept-between-calls",
    catches="a second call continues where the first one ended",
    severity="critical",
    story="A default argument or a module variable that lives on.",
)
def kept_between_calls(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)
    draft = table.perfect_draft(law, 2, VOCABULARY)
    for limit in (4, 4, 2):
        table.run(submission, law, draft, prompt, max_new_tokens=limit, eos_id=eos, budget=2)


@trap(
    "pass-after-the-end",
    catches="the target is called again although the output is complete",
    severity="minor",
    story="The stop test comes one call too late; the extra pass is thrown away and paid for.",
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
    "nothing-to-generate",
    catches="max_new_tokens of 0 generates a token or calls a model",
    severity="minor",
    story="A loop that tests its condition at the end.",
)
def nothing_to_generate(submission: Submission, rng: np.random.Generator) -> None:
    told(submission, rng, table.perfect_draft, 2, compare=["passes"], max_new_tokens=0, budget=2)


@trap(
    "budget-ignored-by-generate",
    catches="the target is given more nodes than the budget allows",
    severity="major",
    story="The budget is what the verification costs; a pass with more nodes is a slower pass.",
)
def budget_ignored(submission: Submission, rng: np.random.Generator) -> None:
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
    "empty-block-gives-up",
    catches="a drafter without a proposal ends the generation",
    severity="major",
    story="No node means one token a pass, not none.",
)
def empty_block(submission: Submission, rng: np.random.Generator) -> None:
    prompt, _, eos, law = story_of(rng)

    def silent(prefix: table.Prefix) -> np.ndarray:  # noqa: ARG001 - it has nothing to say
        return np.zeros((0, VOCABULARY))

    table.run(submission, law, silent, prompt, max_new_tokens=4, eos_id=eos, budget=3)
    impossible = np.full((2, VOCABULARY), -np.inf)
    table.run(submission, law, lambda _: impossible, prompt, max_new_tokens=3, eos_id=eos, budget=3)


@trap(
    "only-the-chain-is-drafted",
    catches="generate verifies the most likely chain instead of the tree",
    severity="critical",
    story="The tree exists, is tested, and is not used where it counts.",
)
def only_the_chain(submission: Submission, rng: np.random.Generator) -> None:
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


@trap(
    "rootless-prompt-accepted",
    catches="an empty prompt is accepted although there is no root",
    severity="minor",
    story="prefix[-1] of nothing fails somewhere else, later, with another error.",
)
def rootless_prompt(submission: Submission, rng: np.random.Generator) -> None:
    eos = int(rng.integers(VOCABULARY))
    target = Stub(tree_log_probs=lambda prefix, tokens, parents: np.zeros((len(tokens) + 1, 7)))
    drafter = Stub(block=lambda prefix: np.full((1, 7), -2.0))
    settings = {"max_new_tokens": 3, "eos_id": eos, "budget": 2}
    refused(submission, "generate", target, drafter, [], **settings)


@trap(
    "bad-target-answers-accepted",
    catches="an answer of the target with the wrong rows or with NaN goes unnoticed",
    severity="major",
    story="NaN is what argmax likes best.",
)
def bad_target_answers(submission: Submission, rng: np.random.Generator) -> None:
    settings = {"max_new_tokens": 3, "eos_id": int(rng.integers(VOCABULARY)), "budget": 2}
    drafter = Stub(block=lambda prefix: np.full((1, VOCABULARY), -2.0))

    def answered(answer: Any) -> None:
        target = Stub(tree_log_probs=lambda prefix, tokens, parents: answer(len(tokens) + 1))
        refused(submission, "generate", target, drafter, [1, 2], **settings)

    def one_nan(rows: int) -> np.ndarray:
        """In the last row, which verification does not come to."""
        values = np.full((rows, VOCABULARY), -2.0)
        values[-1, -1] = np.nan
        return values

    answered(lambda rows: np.full((rows - 1, VOCABULARY), -2.0))
    answered(lambda rows: np.full((rows + 1, VOCABULARY), -2.0))
    answered(lambda rows: np.full((rows, VOCABULARY), np.nan))
    answered(one_nan)
    answered(lambda rows: np.full((rows, VOCABULARY), -2))
    answered(lambda rows: np.full((rows, VOCABULARY), -2.0 + 0.0j))
