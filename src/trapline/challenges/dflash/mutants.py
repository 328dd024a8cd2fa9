"""The bugs that the traps catch, as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

_PUSH = "            heapq.heappush(heap, (-(above + value), depth, parent, token, rank, above))\n"
_POP = "        negative, depth, parent, token, rank, above = heapq.heappop(heap)\n"
_SIBLING = "        offer(above, depth, parent, rank + 1)\n"
_WHILE = "    while heap and len(tokens) < budget:\n"
_TREE = "    return np.array(tokens, dtype=np.int64), np.array(parents, dtype=np.int64)\n"
_RANKED = "    ranked = [ranking(row, budget) for row in log_q]\n"
_BEST = '    best = candidates[np.argsort(-row[candidates], kind="stable")[:count]]\n'
_INHERIT = "        mask[node + 1] = mask[parent + 1]\n"
_MASK = "    return mask\n"
_WALK = (
    "    path = []\n    node = -1\n    while (node, choices[node + 1]) in children:\n"
    "        node = children[node, choices[node + 1]]\n        path.append(node)\n"
)
_VERDICT = "    return path, choices[node + 1]\n"
_PICKS = (
    "    choices = [pick(row, uniform) for row, uniform in zip(probs, uniforms, strict=True)]\n"
)
_EXCEEDING = "    exceeding = np.flatnonzero(np.cumsum(row) > uniform)\n"
_LAST = "    return int(np.flatnonzero(row > 0.0)[-1])\n"
_ROWS = "    rows = [*range(first), *(first + node for node in nodes)]\n"
_KEPT = "    return kv[..., rows, :]\n"
_LOOP = "    while len(output) < limit and eos_id not in output[-1:]:\n"
_BLOCK = "        tokens, parents = build_tree(drafter.block(prefix + output), budget)\n"
_ASKED = "        answer = target.tree_log_probs(prefix + output, tokens, parents)\n"
_JUDGED = (
    "        path, bonus = verify_tree(tokens, parents, best_tokens(answer, len(tokens) + 1))\n"
)
_FRESH = "        fresh = until_end([*drafted, bonus], eos_id)[: limit - len(output)]\n"
_COUNT = "        accepted += min(len(drafted), len(fresh))\n"
_OUTPUT = "    return output, {"

MUTANTS: list[Mutant] = [
    # building
    edit("chain-instead-of-tree", (_SIBLING, "")),
    edit("only-one-branch-grows", (_SIBLING, "        if not depth:\n    " + _SIBLING)),
    edit(
        "fixed-width-levels",
        (_RANKED, "    ranked = [ranking(row, max(1, budget // len(log_q))) for row in log_q]\n"),
    ),
    edit("siblings-cut-short", (_RANKED, _RANKED.replace("budget", "min(budget, 16)"))),
    edit("root-counted-in-the-budget", (_WHILE, _WHILE.replace("< budget", "< budget - 1"))),
    edit(
        "breadth-first-order",
        (
            _TREE,
            "    depths = []\n"
            "    for parent in parents:\n"
            "        depths.append(depths[parent] + 1 if parent >= 0 else 0)\n"
            "    order = np.argsort(depths, kind='stable').tolist()\n"
            "    places = {-1: -1, **{node: place for place, node in enumerate(order)}}\n"
            "    tokens = [tokens[node] for node in order]\n"
            "    parents = [places[parents[node]] for node in order]\n" + _TREE,
        ),
    ),
    edit("first-draft-row-skipped", (_RANKED, _RANKED.replace("in log_q", "in log_q[1:]"))),
    edit(
        "parents-count-from-one",
        ("        parents.append(parent)\n", "        parents.append(parent + 1)\n"),
    ),
    edit(
        "tie-deeper-first",
        (_PUSH, _PUSH.replace(", depth, parent", ", -depth, parent")),
        (_POP, _POP + "        depth = -depth\n"),
    ),
    edit(
        "tie-higher-parent-first",
        (_PUSH, _PUSH.replace("depth, parent", "depth, -parent")),
        (_POP, _POP + "        parent = -parent\n"),
    ),
    edit("tie-higher-token-first", (_BEST, "    candidates = candidates[::-1]\n" + _BEST)),
    edit(
        "token-before-parent-in-ties",
        (_PUSH, _PUSH.replace("parent, token", "token, parent")),
        (_POP, _POP.replace("parent, token", "token, parent")),
    ),
    edit(
        "weights-underflow",
        (_PUSH, _PUSH.replace("-(above + value)", "-(above * np.exp(value))")),
        ("    offer(0.0, 0, -1, 0)\n", "    offer(1.0, 0, -1, 0)\n"),
    ),
    edit(
        "weights-in-float32",
        (_PUSH, _PUSH.replace("-(above + value)", "-float(np.float32(above + value))")),
    ),
    edit(
        "draft-normalised",
        (
            _RANKED,
            "    log_q = log_q - np.log(np.exp(log_q).sum(axis=1, keepdims=True))\n" + _RANKED,
        ),
    ),
    edit("budget-over-all-prefixes", (_WHILE, _WHILE.replace("heap and ", ""))),
    edit("budget-zero", (_RANKED, "    budget = max(budget, 1)\n" + _RANKED)),
    edit(
        "draft-modified",
        (
            "    log_q = checked_log_q(log_q)\n",
            "    given, log_q = log_q, checked_log_q(log_q)\n    given -= given.max()\n",
        ),
    ),
    edit(
        "bad-drafts-accepted",
        ("    if np.isnan(log_q).any() or np.isposinf(log_q).any():\n", "    if log_q is None:\n"),
    ),
    edit(
        "negative-budget-accepted",
        ('    budget = whole(budget, "budget", least=0)\n' + _RANKED, _RANKED),
    ),
    # masking
    edit(
        "mask-causal",
        (_INHERIT, "        mask[node + 1] = mask[node]\n"),
    ),
    edit(
        "mask-without-self",
        (
            _MASK,
            "    mask[np.arange(1, count + 1), prefix_len + np.arange(1, count + 1)] = False\n"
            + _MASK,
        ),
    ),
    edit(
        "mask-parent-only",
        (
            _INHERIT,
            "        mask[node + 1, : prefix_len + 1] = True\n"
            "        mask[node + 1, prefix_len + 1 + parent] = True\n",
        ),
    ),
    edit("mask-without-root", (_MASK, "    mask[1:, prefix_len] = False\n" + _MASK)),
    edit("mask-without-prefix", (_MASK, "    mask[1:, :prefix_len] = False\n" + _MASK)),
    edit("mask-root-sees-drafts", (_MASK, "    mask[0] = True\n" + _MASK)),
    edit(
        "mask-transposed",
        (_MASK, "    mask[:, prefix_len:] = mask[:, prefix_len:].T.copy()\n" + _MASK),
    ),
    edit("mask-prefix-counts-the-root", (_MASK, "    return mask[:, 1:]\n")),
    edit("mask-not-boolean", (_MASK, "    return mask.astype(np.float64)\n")),
    edit(
        "mask-of-nothing",
        (
            '    prefix_len = whole(prefix_len, "prefix_len", least=0)\n    count',
            '    prefix_len = whole(prefix_len, "prefix_len", least=1)\n    count',
        ),
    ),
    edit(
        "impossible-parents-accepted",
        ("        if not -1 <= parent < node:\n", "        if parent >= len(values):\n"),
    ),
    # verifying
    edit(
        "positional-logits",
        (
            _WALK,
            "    path = []\n    node = -1\n    for number, token in enumerate(tokens):\n"
            "        if parents[number] == node and token == choices[number]:\n"
            "            node = number\n            path.append(number)\n",
        ),
    ),
    edit(
        "depth-wise-logits",
        (
            _WALK,
            "    path = []\n    node = -1\n    while (node, choices[len(path)]) in children:\n"
            "        node = children[node, choices[len(path)]]\n        path.append(node)\n",
        ),
    ),
    edit(
        "orphan-accepted",
        (
            _WALK,
            "    path = [\n        number\n        for number, token in enumerate(tokens)\n"
            "        if token == choices[parents[number] + 1]\n    ]\n"
            "    node = path[-1] if path else -1\n",
        ),
    ),
    edit(
        "chain-only-verification",
        (
            _WALK,
            "    path = []\n    node = -1\n"
            "    while node + 1 < len(tokens) and tokens[node + 1] == choices[node + 1]:\n"
            "        node += 1\n        path.append(node)\n",
        ),
    ),
    edit(
        "second-sibling-never-tried",
        (
            "        children.setdefault((parent, token), node)\n",
            "        if parent not in [above for above, _ in children]:\n"
            "            children[parent, token] = node\n",
        ),
    ),
    edit(
        "child-judged-by-itself",
        (
            _WALK,
            "    path = []\n    node = -1\n    for number, token in enumerate(tokens):\n"
            "        if parents[number] == node and token == choices[number + 1]:\n"
            "            node = number\n            path.append(number)\n",
        ),
    ),
    edit("bonus-of-the-root", (_VERDICT, "    return path, choices[0]\n")),
    edit("bonus-of-the-last-row", (_VERDICT, "    return path, choices[-1]\n")),
    edit(
        "bonus-repeats-the-path",
        (_VERDICT, "    return path, tokens[node] if path else choices[0]\n"),
    ),
    edit("one-node-a-pass", (_WALK, _WALK + "        break\n")),
    edit("path-of-rows", (_VERDICT, "    return [n + 1 for n in path], choices[node + 1]\n")),
    edit("path-of-tokens", (_VERDICT, "    return [tokens[n] for n in path], choices[node + 1]\n")),
    edit(
        "nothing-drafted",
        (
            _WALK,
            "    if not max(tokens) >= 0:\n        raise ValueError('negative tokens')\n" + _WALK,
        ),
    ),
    edit(
        "wrong-choice-count-accepted",
        ("array.ndim != 1 or (count is not None and array.size != count)", "array.ndim != 1"),
    ),
    # sampling
    edit(
        "biased-by-redrawing",
        (
            _PICKS,
            _PICKS
            + "    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):\n"
            "        if uniforms[node + 1] < probs[parent + 1, token]:\n"
            "            choices[parent + 1] = int(token)\n",
        ),
    ),
    edit("greedy-instead-of-sampled", (_PICKS, "    choices = probs.argmax(axis=1).tolist()\n")),
    edit(
        "one-number-for-all",
        (_PICKS, _PICKS.replace("pick(row, uniform)", "pick(row, uniforms[0])")),
    ),
    edit(
        "numbers-by-depth",
        (
            _PICKS,
            "    depths = [0]\n    for parent in parents:\n"
            "        depths.append(depths[parent + 1] + 1)\n"
            "    numbers = [uniforms[depth] for depth in depths]\n"
            "    choices = [pick(row, u) for row, u in zip(probs, numbers, strict=True)]\n",
        ),
    ),
    edit(
        "only-children-sampled",
        (
            _PICKS,
            "    for row in range(len(probs)):\n"
            "        below = [t for t, p in zip(tokens, parents, strict=True) if p + 1 == row]\n"
            "        if below:\n"
            "            kept = probs[row, below]\n"
            "            probs[row] = 0.0\n"
            "            probs[row, below] = kept / kept.sum()\n" + _PICKS,
        ),
    ),
    edit(
        "sorted-by-probability",
        (
            _EXCEEDING,
            "    order = np.argsort(-row, kind='stable')\n"
            "    exceeding = order[np.cumsum(row[order]) > uniform]\n",
        ),
    ),
    edit("boundary-belongs-below", (_EXCEEDING, _EXCEEDING.replace("> uniform", ">= uniform"))),
    edit(
        "impossible-token-at-zero",
        (
            _EXCEEDING,
            _EXCEEDING.replace(
                "> uniform", ">= uniform if not uniform else np.cumsum(row) > uniform"
            ),
        ),
    ),
    edit("rounding-falls-off-the-end", (_LAST, "    return len(row) - 1\n")),
    edit("rounding-starts-again", (_LAST, "    return 0\n")),
    edit(
        "bad-laws-accepted",
        (
            "    if not ((uniforms >= 0.0) & (uniforms < 1.0)).all():\n",
            "    if uniforms is None:\n",
        ),
    ),
    # committing
    edit("cache-not-compacted", (_ROWS, "    rows = [*range(first + len(nodes))]\n")),
    edit("cache-rows-off-by-one", (_ROWS, _ROWS.replace("first + node", "first - 1 + node"))),
    edit(
        "root-row-lost",
        (_ROWS, _ROWS.replace("range(first)", "range(prefix_len)") + "    rows = rows or [0]\n"),
    ),
    edit(
        "row-for-the-bonus",
        (_KEPT, "    return kv[..., [*rows, min(max(rows) + 1, kv.shape[-2] - 1)], :]\n"),
    ),
    edit("path-sorted", (_ROWS, _ROWS.replace("in nodes", "in sorted(nodes)"))),
    edit("one-layout-only", (_KEPT, "    return np.take(kv, rows, axis=min(1, kv.ndim - 2))\n")),
    edit(
        "empty-path-fails",
        (
            _KEPT,
            "    below = kv[..., np.array(nodes) + first, :]\n"
            "    return np.concatenate([kv[..., :first, :], below], axis=-2)\n",
        ),
    ),
    edit(
        "cache-moved-in-place",
        (
            _KEPT,
            "    kv[..., : len(rows), :] = kv[..., rows, :]\n    return kv[..., : len(rows), :]\n",
        ),
    ),
    edit("cache-dtype-changed", (_KEPT, "    return kv[..., rows, :].astype(np.float64)\n")),
    edit(
        "path-outside-the-cache",
        ('"a node of the path", least=0', '"a node of the path", least=-9'),
    ),
    # generating
    edit(
        "drafts-not-verified",
        (
            _JUDGED,
            _JUDGED + "        path = [] if not len(tokens) else [0]\n",
        ),
    ),
    edit(
        "committed-prefix-wrong",
        (_ASKED, _ASKED.replace("prefix + output", "prefix + bonuses")),
        (_BLOCK, _BLOCK.replace("prefix + output", "prefix + bonuses")),
        ("    passes = accepted = 0\n", "    passes = accepted = 0\n    bonuses = []\n"),
        ("        output += fresh\n", "        output += fresh\n        bonuses.append(bonus)\n"),
    ),
    edit(
        "prefix-without-root", (_ASKED, _ASKED.replace("prefix + output", "(prefix + output)[:-1]"))
    ),
    edit("drafter-left-behind", (_BLOCK, _BLOCK.replace("prefix + output", "prefix"))),
    edit("bonus-thrown-away", (_FRESH, _FRESH.replace("[*drafted, bonus]", "drafted or [bonus]"))),
    edit(
        "end-inside-a-branch",
        (_FRESH, "        fresh = [*drafted, bonus][: limit - len(output)]\n"),
    ),
    edit("runs-past-the-limit", (_FRESH, "        fresh = until_end([*drafted, bonus], eos_id)\n")),
    edit("accepted-counts-what-was-cut", (_COUNT, "        accepted += len(drafted)\n")),
    edit("accepted-counts-the-bonus", (_COUNT, "        accepted += len(fresh)\n")),
    edit("passes-miscounted", ("    passes = accepted = 0\n", "    passes, accepted = 1, 0\n")),
    edit(
        "tie-higher-token-said",
        (
            "    return log_probs.argmax(axis=1)\n",
            "    return log_probs.shape[1] - 1 - log_probs[:, ::-1].argmax(axis=1)\n",
        ),
    ),
    edit("end-left-out", (_OUTPUT, "    output = [t for t in output if t != eos_id]\n" + _OUTPUT)),
    edit("prompt-in-the-output", (_OUTPUT, "    return prefix + output, {")),
    edit("end-at-once", (_LOOP, _LOOP.replace("output[-1:]", "output[1:]"))),
    edit("end-in-the-prompt", (_LOOP, _LOOP.replace("output[-1:]", "(prefix + output)[-1:]"))),
    edit(
        "generating-modifies-the-prompt",
        (_OUTPUT, "    prompt.extend(output)\n" + _OUTPUT),
    ),
    edit(
        "text-kept-between-calls",
        ("    output = []\n", "    output = KEPT\n"),
        ("def until_end(", "KEPT = []\n\n\ndef until_end("),
    ),
    edit(
        "pass-after-the-end",
        (
            _OUTPUT,
            "    target.tree_log_probs(prefix + output, tokens, parents)\n    passes += 1\n"
            + _OUTPUT,
        ),
    ),
    edit(
        "nothing-to-generate",
        (_LOOP, _LOOP.replace("len(output) < limit", "(not output or len(output) < limit)")),
        (_FRESH, _FRESH.replace("limit - len(output)", "max(limit, 1) - len(output)")),
    ),
    edit("budget-ignored-by-generate", (_BLOCK, _BLOCK.replace(", budget)", ", budget + 1)"))),
    edit(
        "empty-block-gives-up",
        (_BLOCK, _BLOCK + "        if not len(tokens):\n            break\n"),
    ),
    edit(
        "only-the-chain-is-drafted",
        (
            _BLOCK,
            "        block = drafter.block(prefix + output)[:budget]\n"
            "        tokens = block.argmax(axis=1)\n"
            "        parents = np.arange(len(tokens)) - 1\n",
        ),
    ),
    edit(
        "rootless-prompt-accepted",
        ("    if not prefix:\n", "    if prefix is None:\n"),
    ),
    edit(
        "bad-target-answers-accepted", ("    if np.isnan(log_probs).any():\n", "    if rows < 0:\n")
    ),
    edit(
        "tie-parent-before-depth",
        (_PUSH, _PUSH.replace("depth, parent, token,", "parent, token, depth,")),
        (_POP, _POP.replace("depth, parent, token,", "parent, token, depth,")),
    ),
    edit(
        "mask-of-a-long-branch",
        (
            _INHERIT,
            "        mask[node + 1, : prefix_len + 1] = True\n"
            "        for _ in range(64):\n"
            "            if parent >= 0:\n"
            "                mask[node + 1, prefix_len + 1 + parent] = True\n"
            "                parent = parents[parent]\n",
        ),
    ),
    edit(
        "picks-in-float32",
        (
            "    return log_probs.argmax(axis=1)\n",
            "    return log_probs.astype(np.float32).argmax(axis=1)\n",
        ),
    ),
    edit(
        "draft-length-remembered",
        (_LOOP, "    depth = None\n" + _LOOP),
        (
            _BLOCK,
            "        block = drafter.block(prefix + output)\n"
            "        depth = len(block) if depth is None else depth\n"
            "        tokens, parents = build_tree(block[:depth], budget)\n",
        ),
    ),
    edit(
        "complex-arrays-accepted",
        (
            '    if probs.dtype.kind != "f":\n',
            '    if probs.dtype.kind not in "fc":\n',
        ),
    ),
]

#: Mechanical mutants that no check can tell from the solution, and why.
EQUIVALENT: dict[str, str] = {
    "solution.py:<module>/drop-operand/1": "a type alias, read by no code",
    "solution.py:best_tokens/bool/1": "verify_tree refuses picks of another count or rank itself",
    "solution.py:best_tokens/never/1": "verify_tree refuses picks of another count or rank itself",
    "solution.py:build_tree/constant/2": "all weights grow by one, and their order stays",
    "solution.py:generate/constant/6": "the end can only be the last token of the output",
    "solution.py:ranking/compare/1": "with as many values as places, all are candidates either way",
    "solution.py:ranking/compare/3": "prefixes of probability zero may be left out or kept",
    "solution.py:ranking/constant/1": "the partition only saves time: the sort alone would do",
    "solution.py:ranking/never/1": "the partition only saves time: the sort alone would do",
    "solution.py:ranking/constant/2": "both sequences always have one length",
    "solution.py:ranking/drop-keyword/2": "both sequences always have one length",
    "solution.py:verify_sampled/constant/1": "checked_uniforms has compared the lengths",
    "solution.py:verify_sampled/drop-keyword/1": "checked_uniforms has compared the lengths",
    "solution.py:verify_tree/constant/2": "checked_ints has compared the lengths",
    "solution.py:verify_tree/drop-keyword/1": "checked_ints has compared the lengths",
}
