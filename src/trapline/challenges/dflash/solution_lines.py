"""Lines of the gold solution that the mutants of several trap files edit."""

RANKED = "    ranked = [ranking(row, budget) for row in log_q]\n"
PUSH = "            heapq.heappush(heap, (-(above + value), depth, parent, token, rank, above))\n"
POP = "        negative, depth, parent, token, rank, above = heapq.heappop(heap)\n"
INHERIT = "        mask[node + 1] = mask[parent + 1]\n"
LOOP = "    while len(output) < limit and eos_id not in output[-1:]:\n"
BLOCK = (
    "        block = drafter.block(prefix + output)\n"
    "        tokens, parents = build_tree(block, budget)\n"
)
