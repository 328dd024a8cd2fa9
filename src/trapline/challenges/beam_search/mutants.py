"""The bugs that the traps catch, as edits of the gold solution."""

from trapline.arena.certify.mutate import Mutant, edit

_SCORE = "        return total / length**self.length_penalty\n"
_ENTER = "            score = self.rules.score(float(total), self.length)\n"
_FINISH = "        self._finish(totals[:, self.rules.eos_id])\n"
_MASK = "        totals[:, self.rules.eos_id] = -np.inf\n"
_EXPAND = "        chosen = largest(totals.ravel(), self.rules.beam_width)\n"
_RESULT = "        return [(hypothesis.tokens, hypothesis.score) for hypothesis in self.pool]\n"
_BOUND = (
    "        return max(self.score(total, length + 1), self.score(total, self.max_new_tokens))\n"
)
_RETURN = "    return [search.results() for search in searches]\n"
_CALL = "    log_probs = checked(lm.log_probs(prefixes), len(prefixes), eos_id)\n"

MUTANTS: list[Mutant] = [
    edit("eos-beam-dropped", (_FINISH, "")),
    edit("pool-forgets-earlier-steps", (_FINISH, "        self.pool = []\n" + _FINISH)),
    edit("finished-beam-expanded", (_MASK, "")),
    edit(
        "eos-takes-a-slot",
        (_MASK, ""),
        (
            "        self._expand(totals)\n",
            "        self._expand(totals)\n"
            "        alive = [i for i, b in enumerate(self.beams) if b[-1] != self.rules.eos_id]\n"
            "        self.beams = [self.beams[i] for i in alive]\n"
            "        self.sums = self.sums[alive]\n",
        ),
    ),
    edit(
        "eos-fills-the-row",
        (
            _MASK,
            "        width = min(self.rules.beam_width, totals.shape[1])\n"
            "        floors = -np.partition(-totals, width - 1, axis=1)[:, width - 1 : width]\n"
            "        totals[totals < floors] = -np.inf\n" + _MASK,
        ),
    ),
    edit(
        "eos-only-when-ranked",
        (
            "        possible = np.flatnonzero(totals > -np.inf)\n",
            "        possible = np.flatnonzero(totals >= self.cut)\n",
        ),
        (
            _FINISH,
            "        flat = np.sort(totals.ravel())\n"
            "        self.cut = flat[-min(self.rules.beam_width, flat.size)]\n" + _FINISH,
        ),
    ),
    edit(
        "finished-use-up-the-width",
        (
            _EXPAND,
            "        width = max(1, self.rules.beam_width - len(self.pool))\n"
            "        chosen = largest(totals.ravel(), width)\n",
        ),
    ),
    edit(
        "pool-keeps-the-first",
        (
            "            self.pool.append(Hypothesis(tokens, score))\n",
            "            if len(self.pool) < self.rules.beam_width:\n"
            "                self.pool.append(Hypothesis(tokens, score))\n",
        ),
    ),
    edit("pool-unbounded", ("        del self.pool[self.rules.beam_width :]\n", "")),
    edit("worst-first", (_RESULT, _RESULT.replace("self.pool", "reversed(self.pool)"))),
    edit(
        "immediate-end-forbidden",
        (_FINISH, "        if self.length > 1:\n    " + _FINISH),
    ),
    edit(
        "eos-in-the-prompt",
        (
            "        self.beams = [[]]\n",
            "        self.beams = [] if prompt[-1:] == [rules.eos_id] else [[]]\n",
        ),
    ),
    edit(
        "penalty-on-running-sum",
        (
            "        self.sums = totals.ravel()[chosen]\n",
            "        self.sums = self.rules.score(totals.ravel()[chosen], self.length)\n",
        ),
    ),
    edit(
        "ranked-by-sum",
        (
            "key=lambda hypothesis: -hypothesis.score)",
            "key=lambda h: -h.score * len(h.tokens) ** self.rules.length_penalty)",
        ),
    ),
    edit(
        "prompt-counted-in-length",
        (_ENTER, _ENTER.replace("self.length", "self.length + len(self.prompt)")),
    ),
    edit(
        "eos-not-counted",
        (
            _ENTER,
            "            n = self.length - (tokens[-1] == self.rules.eos_id)\n"
            "            score = self.rules.score(float(total), max(n, 1))\n",
        ),
    ),
    edit(
        "unfinished-length-off-by-one",
        (
            _ENTER,
            "            n = self.length + (tokens[-1] != self.rules.eos_id)\n"
            "            score = self.rules.score(float(total), n)\n",
        ),
    ),
    edit(
        "negative-penalty-ignored",
        (_SCORE, _SCORE.replace("self.length_penalty", "max(self.length_penalty, 0.0)")),
    ),
    edit(
        "zero-penalty-as-default",
        ("        finite(length_penalty,", "        finite(length_penalty or 1.0,"),
    ),
    edit("penalty-multiplied", (_SCORE, _SCORE.replace("/", "*"))),
    edit(
        "shifted-length-penalty",
        (_SCORE, _SCORE.replace("length**", "((5 + length) / 6) ** ")),
    ),
    edit(
        "score-is-the-sum",
        (
            _RESULT,
            _RESULT.replace(
                "hypothesis.score)",
                "hypothesis.score * len(hypothesis.tokens) ** self.rules.length_penalty)",
            ),
        ),
    ),
    edit(
        "log-probabilities-as-logits",
        (
            "    return log_probs\n",
            "    return log_probs - np.log(np.exp(log_probs).sum(axis=1, keepdims=True))\n",
        ),
    ),
    edit(
        "probabilities-underflow",
        (
            "        totals = self.sums[:, None] + log_probs\n",
            "        with np.errstate(divide='ignore'):\n"
            "            totals = np.log(np.exp(self.sums)[:, None] * np.exp(log_probs))\n",
        ),
    ),
    edit(
        "sums-in-float32",
        (
            "        totals = self.sums[:, None] + log_probs\n",
            "        totals = (self.sums[:, None] + log_probs).astype(np.float32)\n",
        ),
    ),
    edit(
        "prompt-in-the-answer",
        (_RESULT, _RESULT.replace("(hypothesis.tokens", "(self.prompt + hypothesis.tokens")),
    ),
    edit(
        "eos-stripped",
        (
            _RESULT,
            _RESULT.replace(
                "(hypothesis.tokens",
                "([t for t in hypothesis.tokens if t != self.rules.eos_id]",
            ),
        ),
    ),
    edit(
        "answers-padded",
        (
            _RESULT,
            _RESULT.replace(
                "(hypothesis.tokens",
                "(hypothesis.tokens + [self.rules.eos_id]"
                " * (self.rules.max_new_tokens - len(hypothesis.tokens))",
            ),
        ),
    ),
    edit(
        "prompts-modified",
        ("Search(token_list(prompt), rules)", "Search(prompt, rules)"),
        (_RESULT, "        self.prompt += self.pool[0].tokens\n" + _RESULT),
    ),
    edit(
        "answers-remembered",
        (
            _RETURN,
            "    return [\n"
            "        REMEMBERED.setdefault(tuple(s.prompt), s.results()) for s in searches\n"
            "    ]\n\n\nREMEMBERED = {}\n",
        ),
    ),
    edit(
        "first-end-stops",
        (
            "        return bound <= self.pool[-1].score\n",
            "        return True\n",
        ),
        (
            "        if len(self.pool) < self.rules.beam_width or not self.beams:\n",
            "        if not self.pool or not self.beams:\n",
        ),
    ),
    edit(
        "full-pool-stops",
        ("        return bound <= self.pool[-1].score\n", "        return True\n"),
    ),
    edit("bound-at-current-length", (_BOUND, "        return self.score(total, length)\n")),
    edit("bound-at-next-length", (_BOUND, "        return self.score(total, length + 1)\n")),
    edit(
        "negative-penalty-bound",
        (_BOUND, "        return self.score(total, self.max_new_tokens)\n"),
    ),
    edit("bound-from-the-weakest-beam", ("float(self.sums[0])", "float(self.sums[-1])")),
    edit(
        "never-stops-early",
        ("        return bound <= self.pool[-1].score\n", "        return False\n"),
    ),
    edit("a-tie-does-not-stop", ("bound <= self.pool[-1].score", "bound < self.pool[-1].score")),
    edit(
        "loose-bound-below-zero",
        (_BOUND, _BOUND.replace("length + 1", "length")),
    ),
    edit("everything-ends", (" or not self.beams:\n", ":\n")),
    edit(
        "cut-off-hypotheses-lost",
        ("            self._enter(self.beams, self.sums)\n", ""),
    ),
    edit(
        "cut-off-only-when-nothing-ended",
        (
            "            self._enter(self.beams, self.sums)\n",
            "            if not self.pool:\n                self._enter(self.beams, self.sums)\n",
        ),
    ),
    edit(
        "one-token-too-many",
        (
            "        if self.length == self.rules.max_new_tokens:\n",
            "        if self.length > self.rules.max_new_tokens:\n",
        ),
    ),
    edit(
        "one-token-short",
        (
            "        if self.length == self.rules.max_new_tokens:\n",
            "        if self.length >= self.rules.max_new_tokens - 1:\n",
        ),
    ),
    edit(
        "identical-beams-at-the-start",
        (
            "        self.beams = [[]]\n",
            "        self.beams = [[] for _ in range(rules.beam_width)]\n",
        ),
        ("        self.sums = np.zeros(1)\n", "        self.sums = np.zeros(rules.beam_width)\n"),
    ),
    edit(
        "each-beam-keeps-its-own-best",
        (
            _EXPAND,
            _EXPAND + "        if self.length > 1:\n"
            "            tops = totals.argmax(axis=1)\n"
            "            chosen = np.arange(len(totals)) * totals.shape[1] + tops\n",
        ),
    ),
    edit("too-few-live-beams", (_EXPAND, _EXPAND.replace("beam_width", "beam_width - 1 or 1"))),
    edit("too-many-live-beams", (_EXPAND, _EXPAND.replace("beam_width", "beam_width * 2"))),
    edit(
        "zero-probability-lives-on",
        ("    candidates = candidates[values[candidates] > -np.inf]\n", ""),
    ),
    edit(
        "zero-probability-ends",
        (
            "        possible = np.flatnonzero(totals > -np.inf)\n",
            "        possible = np.arange(len(totals))\n",
        ),
    ),
    edit("width-over-vocabulary", ("    if values.size > count:\n", "    if values.size:\n")),
    edit(
        "tie-later-hypothesis-wins",
        (
            "            self.pool.append(Hypothesis(tokens, score))\n",
            "            self.pool.insert(0, Hypothesis(tokens, score))\n",
        ),
    ),
    edit(
        "tie-higher-parent-ends-first",
        (
            "        possible = np.flatnonzero(totals > -np.inf)\n",
            "        possible = np.flatnonzero(totals > -np.inf)[::-1]\n",
        ),
    ),
    edit(
        "tie-token-before-parent",
        (_EXPAND, _EXPAND.replace("totals.ravel()", "totals.T.ravel()")),
        (
            "        parents, tokens = np.divmod(chosen, totals.shape[1])\n",
            "        tokens, parents = np.divmod(chosen, totals.shape[0])\n"
            "        chosen = parents * totals.shape[1] + tokens\n",
        ),
    ),
    edit(
        "tie-higher-token-wins",
        (
            "    candidates = candidates[values[candidates] > -np.inf]\n",
            "    candidates = candidates[values[candidates] > -np.inf][::-1]\n",
        ),
    ),
    edit("batch-ends-with-its-first", ("    while any(", "    while searches and all(")),
    edit(
        "pool-shared-by-prompts",
        ("        self.pool = []\n", ""),
        (
            "    def __init__(self, prompt",
            "    pool = []\n\n    def __init__(self, prompt",
        ),
    ),
    edit(
        "rows-cut-by-width",
        (
            "        last = first + len(search.beams)\n",
            "        last = first + search.rules.beam_width\n",
        ),
    ),
    edit(
        "rows-shift-when-a-prompt-ends",
        (
            "    for search in open_searches:\n        last = first + len(search.beams)\n"
            "        search.advance(log_probs[first:last])\n",
            "    for search in searches:\n        last = first + max(1, len(search.beams))\n"
            "        if search.beams:\n            search.advance(log_probs[first:last])\n",
        ),
    ),
    edit(
        "answers-out-of-order",
        (
            _RETURN,
            "    searches.sort(key=lambda search: search.length)\n" + _RETURN,
        ),
    ),
    edit(
        "ended-prompts-still-asked",
        (
            _CALL,
            "    prefixes += [search.prompt for search in searches if not search.beams]\n" + _CALL,
        ),
    ),
    edit(
        "one-call-a-beam",
        (
            _CALL,
            _CALL.replace("lm.log_probs(prefixes)", "[lm.log_probs([p])[0] for p in prefixes]"),
        ),
    ),
    edit(
        "one-call-a-prompt",
        (
            _CALL,
            _CALL.replace(
                "lm.log_probs(prefixes)",
                "np.concatenate([lm.log_probs(s.prefixes()) for s in open_searches])",
            ),
        ),
    ),
    edit(
        "empty-batch-asks",
        ("    while any(", "    step(lm, searches, rules.eos_id)\n    while any("),
    ),
    edit(
        "empty-prompt-refused",
        (
            '    return [whole(token, "a prompt\'s token"',
            "    if not prompt:\n        raise ValueError('no tokens')\n"
            '    return [whole(token, "a prompt\'s token"',
        ),
    ),
    edit(
        "width-zero-accepted",
        ('"beam_width", least=1', '"beam_width", least=-9'),
        (_EXPAND, _EXPAND.replace("self.rules.beam_width", "max(1, self.rules.beam_width)")),
    ),
    edit("no-new-tokens-accepted", ('"max_new_tokens", least=1', '"max_new_tokens", least=-9')),
    edit(
        "fractional-width-accepted",
        (
            "    if isinstance(value, bool) or not isinstance(value, Integral):\n",
            "    if value is None:\n",
        ),
    ),
    edit("nan-penalty-accepted", ("    if not math.isfinite(value):\n", "    if value is None:\n")),
    edit("negative-eos-wraps", ('"eos_id", least=0', '"eos_id", least=-9')),
    edit(
        "eos-outside-the-vocabulary",
        ("    if eos_id >= log_probs.shape[1]:\n", "    if eos_id < 0:\n"),
    ),
    edit(
        "nan-log-probs-accepted",
        (
            "    if np.isnan(log_probs).any() or np.isposinf(log_probs).any():\n",
            "    if rows < 0:\n",
        ),
    ),
    edit(
        "wrong-row-count-accepted",
        (
            "    if log_probs.ndim != 2 or log_probs.shape[0] != rows:\n",
            "    if log_probs.ndim != 2:\n",
        ),
    ),
    edit(
        "certain-end-lost",
        (
            "        possible = np.flatnonzero(totals > -np.inf)\n",
            "        possible = np.flatnonzero((totals < 0.0) & (totals > -np.inf))\n",
        ),
    ),
    edit(
        "large-batch-in-pieces",
        (
            _CALL,
            "    pieces = [prefixes[i : i + 128] for i in range(0, len(prefixes), 128)]\n"
            "    answers = np.concatenate([lm.log_probs(piece) for piece in pieces])\n"
            "    log_probs = checked(answers, len(prefixes), eos_id)\n",
        ),
    ),
    edit("negative-penalty-bound-too-long", (_BOUND, _BOUND.replace("length + 1", "length + 2"))),
    edit(
        "almost-a-tie",
        (
            "        return bound <= self.pool[-1].score\n",
            "        return bound <= self.pool[-1].score + 1e-9\n",
        ),
    ),
    edit(
        "late-zero-probability-lives-on",
        (
            "    return log_probs\n",
            "    return np.maximum(log_probs, -1e9) if rows > 1 else log_probs\n",
        ),
    ),
]

#: Mechanical mutants that no check can tell from the solution, and why.
EQUIVALENT: dict[str, str] = {
    "solution.py:Search._enter/constant/1": "both sequences always have one length",
    "solution.py:Search._enter/drop-keyword/1": "both sequences always have one length",
    "solution.py:Search._expand/constant/2": "both sequences always have one length",
    "solution.py:Search._expand/drop-keyword/1": "both sequences always have one length",
    "solution.py:checked/drop-keyword/1": "adding the float64 sums makes float64 of any answer",
    "solution.py:largest/compare/1": "with as many values as places, all are candidates either way",
    "solution.py:largest/never/1": "the partition only saves time: the sort alone would do",
}
