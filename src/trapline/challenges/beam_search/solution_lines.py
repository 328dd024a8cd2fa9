"""Lines of the gold solution that the mutants of several trap files edit."""

EXPAND = "        chosen = largest(totals.ravel(), self.rules.beam_width)\n"
RESULT = "        return [(hypothesis.tokens, hypothesis.score) for hypothesis in self.pool]\n"
POOLED = "            self.pool.append(Hypothesis(tokens, score))\n"
BOUND = (
    "        return max(self.score(total, length + 1), self.score(total, self.max_new_tokens))\n"
)
RETURN = "    return [search.results() for search in searches]\n"
CALL = "    log_probs = checked(lm.log_probs(prefixes), len(prefixes), eos_id)\n"
