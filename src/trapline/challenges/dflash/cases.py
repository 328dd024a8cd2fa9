"""The contract of tree decoding, case by case, and how its speed is measured."""

from typing import Any

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Call, case, robustness
from trapline.arena.process.proxy import Stub, Submission
from trapline.challenges.dflash import table
from trapline.gold.tree_decoding import oracle


def exact_draft(
    rng: np.random.Generator, depths: int, vocabulary: int, *, levels: int = 64, dtype: Any = None
) -> np.ndarray:
    """Log-probabilities in eighths: sums are exact in every dtype, and ties are frequent."""
    log_q = -rng.integers(1, levels, (depths, vocabulary)) / 8.0
    kind = dtype or (np.float32 if rng.integers(2) else np.float64)
    return np.asarray(log_q.astype(kind))


def judged(entry: str, answer: Any) -> Any:
    """An answer in one form, where the contract leaves its integers and sequences free."""
    try:
        if entry in ("verify_tree", "verify_sampled"):
            path, bonus = answer
            return [[int(node) for node in path], int(bonus)]
        if entry == "generate":
            tokens, stats = answer
            counts = [int(stats[name]) for name in ("target_passes", "accepted")]
            return [[int(token) for token in tokens], *counts]
    except (TypeError, ValueError, KeyError):
        return answer
    return answer


@case
def random_trees(submission: Submission, rng: np.random.Generator) -> None:
    for levels in (64, 6):
        for depths, vocabulary in ((1, 9), (2, 8), (3, 5), (5, 3)):
            log_q = exact_draft(rng, depths, vocabulary, levels=levels)
            table.same_tree(submission, log_q, int(rng.integers(1, 24)))


@case
def trees_with_impossible_tokens(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(4):
        log_q = exact_draft(rng, 3, 6)
        log_q[rng.random(log_q.shape) < 0.6] = -np.inf
        table.same_tree(submission, log_q, int(rng.integers(4, 40)))


@case
def large_trees(submission: Submission, rng: np.random.Generator) -> None:
    """Too large to enumerate: every node must be at least as heavy as everything left out."""
    depths, vocabulary, budget = 8, 50, 200
    log_q = exact_draft(rng, depths, vocabulary, dtype=np.float64) - rng.random(
        (depths, vocabulary)
    )
    heaviest(table.tree(submission, log_q, budget), log_q, budget)


def heaviest(tree: tuple[np.ndarray, np.ndarray], log_q: np.ndarray, budget: int) -> None:
    """A tree of this size, heaviest first, and nothing heavier was left out."""
    tokens, parents = tree
    expect.that(len(tokens) == budget, f"{len(tokens)} nodes for a budget of {budget}")
    weights = table.weights_of(tokens, parents, log_q)
    expect.that(weights == sorted(weights, reverse=True), "not heaviest first")
    taken = set(zip(parents.tolist(), tokens.tolist(), strict=True))
    expect.that(len(taken) == budget, "a prefix occurs twice")
    depth_of = {-1: 0}
    for node, parent in enumerate(parents.tolist()):
        depth_of[node] = depth_of[parent] + 1
    above = {-1: 0.0, **dict(enumerate(weights))}
    best_first = np.argsort(-log_q, axis=1, kind="stable").tolist()
    for node, depth in depth_of.items():
        rest = (
            (t for t in best_first[depth] if (node, t) not in taken) if depth < len(log_q) else ()
        )
        left_out = next((above[node] + float(log_q[depth, token]) for token in rest), -np.inf)
        expect.that(left_out <= weights[-1] + 1e-9, "something heavier was left out")


@case
def tied_siblings(submission: Submission, rng: np.random.Generator) -> None:
    """Hundreds of equal values: enough for a sort that is not stable to show."""
    log_q = -rng.integers(1, 4, (1, 400)) / 2.0
    order = sorted(range(400), key=lambda token: (-log_q[0, token], token))
    for budget in (90, 400):
        table.same_tree(submission, log_q, budget, (order[:budget], [-1] * budget))


@case
def views_of_drafts(submission: Submission, rng: np.random.Generator) -> None:
    log_q = exact_draft(rng, 3, 6, dtype=np.float64)
    wide = np.zeros((12, 9))
    wide[::2, 1::3] = log_q.T
    for view in (wide[::2, 1::3].T, log_q[::-1, ::-1], np.asfortranarray(log_q)):
        table.same_tree(submission, view, 9)


@case
def random_masks(submission: Submission, rng: np.random.Generator) -> None:
    for nodes in (0, 1, 5, 12):
        tree = table.small_tree(rng, nodes, 5)
        prefix_len = int(rng.integers(0, 6))
        got = submission.tree_mask(tree.parents, prefix_len)
        expect.equal(got, oracle.tree_mask(tree.parents.tolist(), prefix_len), "the mask")


@case
def random_verdicts(submission: Submission, rng: np.random.Generator) -> None:
    for nodes in (0, 1, 4, 9, 16, 16):
        tree = table.small_tree(rng, nodes, 4)
        choices = rng.integers(0, 4, nodes + 1)
        # Half of the time the target follows some branch to its end.
        if nodes and rng.integers(2):
            branch = oracle.ancestors(tree.parents.tolist(), int(rng.integers(nodes)))
            for node in branch:
                choices[tree.parents[node] + 1] = tree.tokens[node]
        table.verify(submission, tree.tokens, tree.parents, choices)


@case
def random_samples(submission: Submission, rng: np.random.Generator) -> None:
    for kind in (np.float32, np.float64):
        tree = table.small_tree(rng, 8, 4)
        counts = rng.multinomial(64, [0.4, 0.3, 0.2, 0.1, 0.0], size=9)
        probs = (rng.permuted(counts, axis=1) / 64.0).astype(kind)
        uniforms = (rng.integers(0, 256, 9) / 256.0).astype(kind)
        got = submission.verify_sampled(tree.tokens, tree.parents, probs, uniforms)
        lists = tree.tokens.tolist(), tree.parents.tolist()
        want = oracle.verify_sampled(*lists, probs, uniforms.tolist())
        table.same_verdict(got, want)


@case
def samples_follow_the_law(submission: Submission, rng: np.random.Generator) -> None:
    """Over an even grid of numbers every token comes exactly in proportion to its probability."""
    counts = rng.permutation([1, 2, 5, 8])
    child = int(rng.integers(4))
    seen = np.zeros(4, dtype=np.int64)
    for number in range(16):
        probs = np.stack([counts / 16.0, np.full(4, 0.25)])
        uniforms = np.array([(number + 0.5) / 16.0, 0.125])
        tree = np.array([child]), np.array([-1])
        path, bonus = table.verdict(submission.verify_sampled(*tree, probs, uniforms))
        said = child if path else bonus
        expect.that(0 <= said < 4, f"token {said} is outside the vocabulary")
        seen[said] += 1
    expect.equal(seen.tolist(), counts.tolist(), "how often each token was said")


@case
def random_caches(submission: Submission, rng: np.random.Generator) -> None:
    for lead in ((), (2,), (2, 0, 3), (2, 1, 3)):
        prefix_len, nodes = int(rng.integers(0, 5)), 6
        kind = np.float32 if rng.integers(2) else np.float64
        kv = rng.standard_normal((*lead, prefix_len + 1 + nodes, 4)).astype(kind)
        path = [int(n) for n in np.sort(rng.permutation(nodes)[: rng.integers(0, nodes + 1)])]
        got = submission.compact(kv, prefix_len, path)
        expect.equal(got, oracle.compact(kv, prefix_len, path), "the committed rows")
    strided = rng.standard_normal((4, 2, 9))[:, :, ::-1].transpose(1, 2, 0)
    got = submission.compact(strided, 3, [1, 4])
    expect.equal(got, oracle.compact(strided, 3, [1, 4]), "the committed rows of a view")


@case
def any_drafter_same_output(submission: Submission, rng: np.random.Generator) -> None:
    """Good, bad and mixed drafters change the number of passes, never a token."""
    vocabulary, eos = 6, int(rng.integers(6))
    law = table.random_law(int(rng.integers(2**31)), vocabulary, eos_id=eos, eos_bonus=-1.0)
    prompt = [int(t) for t in rng.integers(0, vocabulary, 3)]
    drafters = (
        table.perfect_draft(law, 3, vocabulary),
        table.hopeless_draft(law, 2, vocabulary),
        table.noisy_draft(int(rng.integers(2**31)), law, 3, vocabulary),
    )
    for draft in drafters:
        for budget in (1, 6):
            settings: dict[str, Any] = {"max_new_tokens": 8, "eos_id": eos, "budget": budget}
            table.run(submission, law, draft, prompt, compare=table.ALL, **settings)


@case
def random_generations(submission: Submission, rng: np.random.Generator) -> None:
    for _ in range(3):
        vocabulary, eos = 5, int(rng.integers(5))
        law = table.random_law(int(rng.integers(2**31)), vocabulary, eos_id=eos)
        draft = table.noisy_draft(int(rng.integers(2**31)), law, 3, vocabulary)
        table.run(
            submission,
            law,
            draft,
            [int(t) for t in rng.integers(0, vocabulary, 2)],
            max_new_tokens=int(rng.integers(1, 12)),
            eos_id=eos,
            budget=int(rng.integers(1, 9)),
            compare=table.ALL,
        )


@case
def a_script_of_drafters(submission: Submission, rng: np.random.Generator) -> None:
    """The drafter changes its character from round to round; its depth changes too."""
    vocabulary, eos = 6, int(rng.integers(6))
    law = table.random_law(int(rng.integers(2**31)), vocabulary, eos_id=eos, eos_bonus=-9.0)
    characters: list[oracle.Draft] = [
        table.perfect_draft(law, 2, vocabulary),
        table.hopeless_draft(law, 3, vocabulary),
        table.noisy_draft(int(rng.integers(2**31)), law, 2, vocabulary),
        lambda prefix: np.zeros((0, vocabulary)),
        table.perfect_draft(law, 1, vocabulary),
    ]
    script = rng.integers(0, len(characters), 64)
    prompt = [int(t) for t in rng.integers(0, vocabulary, 2)]

    def draft(prefix: table.Prefix) -> np.ndarray:
        return characters[int(script[len(prefix)])](prefix)

    settings: dict[str, Any] = {"max_new_tokens": 14, "eos_id": eos, "budget": 5}
    table.run(submission, law, draft, prompt, compare=table.ALL, **settings)


@case
def round_by_round(submission: Submission, rng: np.random.Generator) -> None:
    """The parts at work together against a list of tokens.

    The cache's rows are (token, position), the target reads only what the mask lets it see, and
    after every round the committed rows must spell the text.
    """
    vocabulary, eos = 5, 0
    law = table.random_law(int(rng.integers(2**31)), vocabulary, eos_id=eos)
    draft = table.noisy_draft(int(rng.integers(2**31)), law, 3, vocabulary)
    text = [int(t) for t in rng.integers(0, vocabulary, 3)]
    cache = np.array([[token, place] for place, token in enumerate(text[:-1])], dtype=np.float64)
    for _ in range(4):
        tokens, parents = table.tree(submission, draft(tuple(text)), 7)
        depths = [0]
        for parent in parents.tolist():
            depths.append(depths[parent + 1] + 1)
        fresh = [[text[-1], len(text) - 1]]
        fresh += [[t, len(text) - 1 + d] for t, d in zip(tokens.tolist(), depths[1:], strict=True)]
        rows = np.concatenate([cache, np.array(fresh, dtype=np.float64)])
        mask = submission.tree_mask(parents, len(cache))
        expect.array(mask, shape=(len(fresh), len(rows)), dtype=bool, what="the mask")
        choices = np.array([int(law(_read(rows[seen])).argmax()) for seen in mask])
        path, bonus = table.verdict(submission.verify_tree(tokens, parents, choices))
        expect.that(all(0 <= node < len(tokens) for node in path), f"no such path: {path}")
        kept = submission.compact(rows, len(cache), path)
        shape = (len(cache) + 1 + len(path), 2)
        cache = expect.array(kept, shape=shape, dtype=np.float64, what="the committed rows")
        text += [int(tokens[node]) for node in path]
        expect.equal(_read(cache), tuple(text), "the text that the cache spells")
        text.append(int(bonus))
    greedy = oracle.greedy(law, text[:3], len(text) - 3, eos_id=-1)
    expect.equal(text[3:], greedy, "the text after all rounds")


def _read(rows: np.ndarray) -> table.Prefix:
    """The tokens of rows (token, position) in the order of their positions."""
    expect.that(bool(np.isfinite(rows).all()), "the committed rows hold NaN or infinity")
    ordered = sorted((int(position), int(token)) for token, position in rows)
    places = [position for position, _ in ordered]
    expect.equal(places, list(range(len(places))), "the positions that are visible together")
    return tuple(token for _, token in ordered)


@case
def float32_models(submission: Submission, rng: np.random.Generator) -> None:
    prompt = [int(t) for t in rng.integers(1, 6, 2)]
    script = [int(t) for t in rng.integers(1, 6, 9)]
    law = table.scripted_law(6, tuple(prompt), script)
    draft = table.perfect_draft(law, 2, 6)
    table.run(
        submission,
        law,
        draft,
        prompt,
        dtype=np.float32,
        max_new_tokens=7,
        eos_id=0,
        budget=3,
        compare=table.ALL,
    )


@robustness
def bad_input(submission: Submission, rng: np.random.Generator) -> None:
    bad = (ValueError, TypeError)
    log_q = exact_draft(rng, 2, 4)
    tokens, parents, choices = np.array([1, 2]), np.array([-1, 0]), np.array([1, 2, 0])
    kv = rng.standard_normal((6, 3))
    laws, numbers = np.full((3, 4), 0.25), np.array([0.1, 0.2, 0.3])
    calls = [
        lambda: submission.build_tree(log_q[0], 2),
        lambda: submission.build_tree(log_q, -1),
        lambda: submission.build_tree(np.ones((2, 2), dtype=np.int64), 2),
        lambda: submission.build_tree(log_q * np.nan, 2),
        lambda: submission.tree_mask(np.array([0, -1]), 3),
        lambda: submission.tree_mask(parents, -1),
        lambda: submission.tree_mask(parents[None], 1),
        lambda: submission.tree_mask(parents.astype(np.float64), 1),
        lambda: submission.verify_tree(tokens, parents, choices.astype(np.float64)),
        lambda: submission.verify_tree(tokens, parents, choices[:2]),
        lambda: submission.verify_tree(tokens[:1], parents, choices),
        lambda: submission.verify_tree(tokens, parents + 5, choices),
        lambda: submission.verify_sampled(tokens, parents, laws[:2], numbers[:2]),
        lambda: submission.verify_sampled(tokens, parents, laws, numbers[:2]),
        lambda: submission.verify_sampled(tokens, parents, laws, numbers + 1.0),
        lambda: submission.verify_sampled(tokens, parents, -laws, numbers),
        lambda: submission.verify_sampled(tokens, parents, laws * [[1], [0], [1]], numbers),
        lambda: submission.verify_sampled(tokens, parents, laws > 0.5, numbers),
        lambda: submission.verify_sampled(tokens, parents, np.ones((3, 4), dtype=int), numbers),
        lambda: submission.verify_sampled(tokens, parents, laws.reshape(3, 2, 2), numbers),
        lambda: submission.verify_sampled(tokens, parents, laws, numbers[:, None]),
        lambda: submission.compact(kv, 2, [3]),
        lambda: submission.compact(kv, 2, [-1]),
        lambda: submission.compact(kv[:, 0], 2, [1]),
        lambda: _generate(submission, []),
        lambda: _generate(submission, [1], max_new_tokens=-1),
        lambda: _generate(submission, [1], budget=-1),
    ]
    for call in calls:
        expect.raises(bad, call)


def _generate(submission: Submission, prompt: list[int], **changes: Any) -> Any:
    target = Stub(tree_log_probs=lambda prefix, tokens, parents: np.zeros((len(tokens) + 1, 4)))
    drafter = Stub(block=lambda prefix: np.full((1, 4), -2.0))
    settings = {"max_new_tokens": 3, "eos_id": 1, "budget": 2, **changes}
    return submission.generate(target, drafter, prompt, **settings)


def speed(submission: Submission, rng: np.random.Generator) -> Call:  # noqa: ARG001 - the hook's form
    """A large budget over a real vocabulary: choosing the heaviest prefixes is the work."""
    depths, vocabulary, budget = 8, 4_000, 1_000
    log_q = rng.standard_normal((depths, vocabulary)) * 3.0
    log_q -= np.log(np.exp(log_q).sum(axis=1, keepdims=True))

    def check(got: Any) -> None:
        expect.that(isinstance(got, tuple | list) and len(got) == 2, "not (tokens, parents)")
        heaviest(table.tree_form(*got), log_q, budget)

    return Call("build_tree", (log_q, budget), {}, check)


def measures(submission: Submission, rng: np.random.Generator) -> dict[str, float]:
    """Passes of the target for 48 tokens with a drafter that is often right."""
    vocabulary = 8
    law = table.random_law(int(rng.integers(2**31)), vocabulary, eos_id=0, eos_bonus=-1e3)
    draft = table.noisy_draft(int(rng.integers(2**31)), law, 4, vocabulary)
    prompt = [int(t) for t in rng.integers(1, vocabulary, 3)]
    got = table.run(submission, law, draft, prompt, max_new_tokens=48, eos_id=0, budget=12)
    passes = len(got.target_prefixes)
    return {"calls of the model": float(passes), "accepted length": len(got.tokens) / passes}
