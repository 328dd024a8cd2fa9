"""Bugs of KV caches that decoding against recomputation shows."""

from trapline.arena.judge.traps import edit, edits, insert_after, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.kv_cache.profiles.published.cases import Rng, run

PUBLISHED = "a published answer to this prompt"
_MASK = "    scores = np.where(np.arange(len(keys)) > position[:, None], -np.inf, scores)\n"
_APPEND_K = "    cache.keys[layer][b] = np.concatenate([cache.keys[layer][b], k])\n"
_APPEND_V = "    cache.values[layer][b] = np.concatenate([cache.values[layer][b], v])\n"
_READ = "    keys, values = cache.keys[layer][b], cache.values[layer][b]\n"
_ZEROS = "    out = np.zeros(x.shape)\n"
_POSITION = "    position = np.arange(len(keys) - len(x), len(keys))\n"
_ATTEND = "        out[b, :length] = _attend(cache, layer, b, x[b, :length])\n"


def one_layer(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [3, 3], 3)


def from_nothing(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [0, 0], 4)


def equal_lengths(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [4, 4], 3)


@trap(
    catches="positions of a prompt see later ones: several are appended without a causal mask",
    severity="critical",
    story="Decoding has one query, where no mask is needed; a prompt has many. In one layer only "
    "the prompt's own outputs are wrong, in two the cache itself is.",
    mutant=edit(_MASK, ""),
    seen=PUBLISHED,
    control=from_nothing,
)
def prompt_without_mask(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [4], 0)


@trap(
    catches="all layers share one length: the second layer writes behind the first one's positions",
    severity="critical",
    story="The length of a sequence is advanced by each layer that appends.",
    mutant=edits(
        (
            _APPEND_K,
            "    done = sum(len(kept[b]) for kept in cache.keys[:layer])\n"
            "    gap = np.zeros((max(done - len(cache.keys[layer][b]), 0), *k.shape[1:]))\n"
            "    cache.keys[layer][b] = np.concatenate([cache.keys[layer][b], gap, k])\n",
        ),
        (
            _APPEND_V,
            "    cache.values[layer][b] = np.concatenate([cache.values[layer][b], gap, v])\n",
        ),
    ),
    seen=PUBLISHED,
    control=one_layer,
)
def length_shared_by_layers(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 2, [3], 2)


@trap(
    catches="all sequences go on from the longest prompt: padding stays in the cache of the others",
    severity="critical",
    story="One write position serves the whole batch.",
    mutant=edits(
        (
            "        out[b, :length] = _attend(cache, layer, b, x[b, :length])\n",
            "        out[b] = _attend(cache, layer, b, x[b])\n",
        ),
    ),
    seen=PUBLISHED,
    control=equal_lengths,
)
def padding_kept(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [5, 2], 2)


@trap(
    catches="with prompts of unequal length a step sees the first position alone",
    severity="critical",
    story="The causal mask is made for the queries of this call, whose only position is then 0.",
    mutant=edits(
        (_ZEROS, f"{_ZEROS}    cache.uneven = len(set(lengths)) > 1\n"),
        (
            _POSITION,
            f"{_POSITION}    if len(x) == 1 and getattr(cache, 'uneven', False):\n"
            "        position = np.zeros(1, int)\n",
        ),
    ),
    seen=PUBLISHED,
    control=equal_lengths,
)
def step_sees_the_first_position(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [5, 4], 2)


@trap(
    catches="the cache holds the last call's keys and values alone",
    severity="critical",
    story="The new pair replaces the stored one instead of being appended to it.",
    mutant=edits(
        (
            _READ,
            "    keys, values = cache.keys[layer][b], cache.values[layer][b]\n"
            "    cache.keys[layer][b], cache.values[layer][b] = k, v\n",
        ),
    ),
    seen=PUBLISHED,
)
def cache_replaced(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [0], 8)


@trap(
    catches="a position does not see itself: it attends before it is appended",
    severity="critical",
    story="Attention reads the cache first and writes it afterwards.",
    mutant=edits(
        (
            _MASK,
            "    scores = np.where(np.arange(len(keys)) >= np.maximum(position, 1)[:, None], "
            "-np.inf, scores)\n",
        ),
    ),
)
def own_position_missing(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [0], 4)


@trap(
    catches="scores are not divided by √D",
    severity="major",
    story="The scale is left to the caller, who does not know of it.",
    mutant=edit(" * q.shape[2] ** -0.5", ""),
)
def scale_missing(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [0], 4)


@trap(
    catches="the scale is that of the whole width instead of one head's",
    severity="major",
    story="The model's width is at hand, the head's is not.",
    mutant=edit("q.shape[2] ** -0.5", "x.shape[1] ** -0.5"),
)
def scale_of_all_heads(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [0], 4)


@trap(
    catches="all layers share one cache",
    severity="critical",
    story="The layer is missing in an index.",
    mutant=edits(
        (_APPEND_K, "    cache.keys[0][b] = np.concatenate([cache.keys[0][b], k])\n"),
        (_APPEND_V, "    cache.values[0][b] = np.concatenate([cache.values[0][b], v])\n"),
        (_READ, "    keys, values = cache.keys[0][b], cache.values[0][b]\n"),
    ),
    control=one_layer,
)
def one_cache_for_all_layers(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 2, [0], 3)


@trap(
    catches="all sequences of a batch share one cache",
    severity="critical",
    story="The sequence is missing in an index.",
    mutant=edits(
        (_APPEND_K, "    cache.keys[layer][0] = np.concatenate([cache.keys[layer][0], k])\n"),
        (_APPEND_V, "    cache.values[layer][0] = np.concatenate([cache.values[layer][0], v])\n"),
        (_READ, "    keys, values = cache.keys[layer][0], cache.values[layer][0]\n"),
    ),
)
def one_cache_for_all_sequences(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [0, 0], 3)


@trap(
    catches="the prompt's positions are not kept",
    severity="critical",
    story="Attention over the prompt is computed beside the cache.",
    mutant=insert_after(
        _ATTEND,
        "        cache.keys[layer][b] = cache.keys[layer][b][:0]\n"
        "        cache.values[layer][b] = cache.values[layer][b][:0]\n",
    ),
    control=from_nothing,
)
def prompt_not_kept(submission: Submission, rng: Rng) -> None:
    run(submission, rng, 1, [3], 2)
