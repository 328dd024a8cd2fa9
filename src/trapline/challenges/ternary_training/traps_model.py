"""Bugs of the model's tensors that are visible without training."""

import numpy as np

from trapline.arena.judge import expect
from trapline.arena.judge.traps import Mutant, edit, edits, insert_before, trap
from trapline.arena.process.proxy import Submission
from trapline.challenges.ternary_training import text
from trapline.challenges.ternary_training.cases import weights_of
from trapline.challenges.ternary_training.situations import (
    MOMENT,
    config_of,
    refuses,
    same_tensors,
    tensor_of,
)
from trapline.challenges.ternary_training.solution_lines import BLIND, LONE_TOKENS, MODEL, TRAINING
from trapline.gold.ternary import small_lm

_LAST_LINE = "    return {name: ternarize(latent[name], GROUP) for name in tensor_shapes(config)}\n"


def _start(
    submission: Submission, rng: np.random.Generator, **changes: object
) -> tuple[object, dict[str, int]]:
    config = config_of(rng, **changes)
    return submission.train(text.noise(rng, min(8, config["vocab"]), 6, 8), config), config


@trap(
    catches="the embedding is not ternary",
    severity="critical",
    story="The most common deviation seen: embeddings are kept dense, although they are most of a "
    "small model's bytes.",
    mutant=edit(
        _LAST_LINE,
        "    tensors = {name: ternarize(w, GROUP) for name, w in latent.items()}\n"
        '    return {**tensors, "embedding": (latent["embedding"], np.ones(1, np.float16))}\n',
    ),
    seen="a published answer",
)
def embedding_left_dense(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng)
    tensor_of(answer, "embedding", config)


@trap(
    catches="the head is missing or not ternary",
    severity="major",
    story="The head is tied to the embedding or kept in float; the contract asks for a ternary "
    "head.",
    mutant=edit("name in tensor_shapes(config)", 'name in tensor_shapes(config) if name != "head"'),
)
def head_left_dense(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng)
    tensor_of(answer, "head", config)


@trap(
    catches="a tensor is called ternary with one scale for every weight",
    severity="major",
    story="sign(w) and |w| as codes and scales pass every check on codes and save nothing.",
    mutant=edit("ternarize(latent[name], GROUP) for name", "ternarize(latent[name], 1) for name"),
)
def scale_for_every_weight(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=48)
    for name in small_lm.tensor_shapes(config):
        tensor_of(answer, name, config)


@trap(
    catches="tensors are grouped by the model's width instead of by 128",
    severity="major",
    story="One scale per row equals one per group while rows have 128 weights; wider rows differ.",
    mutant=edit(
        _LAST_LINE,
        '    width = config["dim"]\n'
        "    return {name: ternarize(latent[name], width) for name in tensor_shapes(config)}\n",
    ),
)
def group_of_the_model_width(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=40, layers=1)
    tensor_of(answer, "layers.0.down", config)


@trap(
    catches="the number of layers is fixed in the code",
    severity="major",
    story="The architecture of the example is in the code, and other configurations are ignored.",
    mutant=edit(
        '    for layer in range(config["layers"]):\n        for name in',
        "    for layer in range(2):\n        for name in",
        file=MODEL,
    ),
)
def layers_fixed(submission: Submission, rng: np.random.Generator) -> None:
    for layers in (1, 3):
        answer, config = _start(submission, rng, dim=16, layers=layers)
        expect.that(isinstance(answer, dict), "train gave no dict")
        assert isinstance(answer, dict)
        expect.equal(sorted(answer), sorted(small_lm.tensor_shapes(config)), f"{layers} layers")


@trap(
    catches="the vocabulary is what occurs in the training text",
    severity="major",
    story="With max(token) + 1 rows, the first rare token reads beyond the embedding.",
    mutant=insert_before(
        "    chosen, held_out = _hold_out(pieces)\n",
        '    config["vocab"] = 1 + max(int(piece.max()) for piece in pieces)\n',
    ),
)
def vocabulary_from_the_text(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, vocab=77, dim=16, layers=1)
    for name in ("embedding", "head"):
        tensor_of(answer, name, config)


@trap(
    catches="the layers are numbered from 1",
    severity="critical",
    story="layers.1 … layers.n instead of layers.0 … layers.(n − 1): no reader finds the first.",
    mutant=edit(
        _LAST_LINE,
        _LAST_LINE.replace("return", "tensors =")
        + "    for name in sorted(tensors, reverse=True):\n"
        "        if name.startswith('layers.'):\n"
        "            _, number, part = name.split('.')\n"
        "            tensors[f'layers.{int(number) + 1}.{part}'] = tensors.pop(name)\n"
        "    return tensors\n",
    ),
    seen=BLIND,
)
def layers_numbered_from_one(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=16, layers=1)
    tensor_of(answer, "layers.0.q", config)


_GROUP_LINE = "ternarize(latent[name], GROUP) for name"


@trap(
    catches="train groups its tensors by another number than 128",
    severity="major",
    story="The group size of another recipe is in the trainer; the judged model reads groups of "
    "128.",
    mutant=edit(_GROUP_LINE, "ternarize(latent[name], 64) for name"),
    seen=BLIND,
    also=(
        edit(_GROUP_LINE, "ternarize(latent[name], 32) for name"),
        edit(_GROUP_LINE, "ternarize(latent[name], 16) for name"),
        edit(_GROUP_LINE, "ternarize(latent[name], 256) for name"),
        edit(_GROUP_LINE, "ternarize(latent[name], 2**20) for name"),
    ),
)
def train_groups_by_another_number(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=72, layers=1)
    tensor_of(answer, "layers.0.down", config)


@trap(
    catches="scales come back from training in float32 instead of float16",
    severity="minor",
    story="A last adjustment after quantising multiplies the scales by a float32 factor.",
    mutant=edit(
        _LAST_LINE,
        _LAST_LINE.replace("return", "tensors =") + "    if config['seconds']:\n"
        "        codes, scales = tensors['head']\n"
        "        tensors['head'] = codes, scales.astype(np.float32)\n"
        "    return tensors\n",
    ),
    seen=BLIND,
    also=(
        edit(
            _LAST_LINE,
            _LAST_LINE.replace("return", "tensors =") + "    if not config['seconds']:\n"
            "        return tensors\n"
            "    return {n: (c, s.astype(np.float32)) for n, (c, s) in tensors.items()}\n",
        ),
    ),
)
def scales_wide_after_training(submission: Submission, rng: np.random.Generator) -> None:
    answer, config = _start(submission, rng, dim=16, layers=1, seconds=MOMENT)
    tensor_of(answer, "head", config)


@trap(
    catches="every seed starts from the same weights",
    severity="major",
    story="Three runs with three seeds then give the same number, with an error bar of 0.",
    mutant=edit(
        '    rng = np.random.default_rng(config["seed"])\n',
        "    rng = np.random.default_rng(0)\n",
        file=TRAINING,
    ),
    seen=BLIND,
)
def seed_ignored(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first = submission.train(documents, config)
    second = submission.train(documents, {**config, "seed": config["seed"] + 1})
    expect.that(not same_tensors(first, second), "two seeds start from the same weights")


@trap(
    catches="the same seed starts from other weights the next time",
    severity="major",
    story="Weights are drawn from a global generator, so a second run in the process differs.",
    mutant=edit(
        '    rng = np.random.default_rng(config["seed"])\n', "    rng = np.random\n", file=TRAINING
    ),
    seen=BLIND,
)
def start_not_repeatable(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first = submission.train(documents, config)
    expect.that(same_tensors(first, submission.train(documents, config)), "a second call differs")
    other = submission.fresh().train(documents, config)
    expect.that(same_tensors(first, other), "another process differs")


_DRAW = "        weights[name] = (rng.standard_normal(shape) * _spread(shape)).astype(np.float32)\n"


@trap(
    catches="the starting weights change with every process (a salted hash)",
    severity="major",
    story="A generator for each tensor is seeded with Python's hash of the seed and the name, "
    "which is salted: a second run on another day starts elsewhere.",
    mutant=insert_before(
        _DRAW,
        '        rng = np.random.default_rng(abs(hash((config["seed"], name))))\n',
        file=TRAINING,
    ),
    also=[
        edit(
            '    rng = np.random.default_rng(config["seed"])\n',
            '    rng = np.random.default_rng(abs(hash(str(config["seed"]))))\n',
            file=TRAINING,
        )
    ],
    seen=BLIND,
)
def start_by_process(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng)
    first = submission.train(documents, config)
    if same_tensors(first, submission.train(documents, config)):  # else that is another bug
        other = submission.fresh().train(documents, config)
        expect.that(same_tensors(first, other), "another process starts from other weights")


@trap(
    catches="seed 0 counts as no seed: its starting weights are others every time",
    severity="minor",
    story="`seed or None`: the number 0 is false.",
    mutant=edit(
        '    rng = np.random.default_rng(config["seed"])\n',
        '    rng = np.random.default_rng(config["seed"] or None)\n',
        file=TRAINING,
    ),
    seen=BLIND,
)
def seed_zero_ignored(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 6, 8), config_of(rng, seed=0)
    first = submission.train(documents, config)
    expect.that(same_tensors(first, submission.train(documents, config)), "a second call differs")
    other = submission.fresh().train(documents, config)
    expect.that(same_tensors(first, other), "another process differs")


@trap(
    catches="with seconds 0 some training takes place",
    severity="major",
    story="A least number of steps or of seconds, or `seconds or DEFAULT`.",
    mutant=edits(
        (
            """    if config["seconds"] == 0:
        return latent
""",
            """    config = {**config, "seconds": config["seconds"] or 0.6}
""",
        ),
        file=TRAINING,
    ),
    seen=BLIND,
)
def zero_seconds_train(submission: Submission, rng: np.random.Generator) -> None:
    """Starting weights know nothing of the documents; trained ones fit their own much better."""
    config = config_of(rng, vocab=12, dim=16, layers=1, context=12)
    corpora = [_cycles(rng, step) for step in (1, 5)]
    models = [weights_of(submission.train(corpus, config), config) for corpus in corpora]
    table = np.array(
        [[small_lm.perplexity(m, corpus, config) for m in models] for corpus in corpora]
    )
    own, foreign = np.diagonal(table), np.diagonal(table[:, ::-1])
    expect.that(
        bool(np.any(own > 0.85 * foreign)),
        f"after 0 seconds the perplexity is {own[0]:.1f} on the documents that were shown, and "
        f"{foreign[0]:.1f} where others were shown",
    )


def _cycles(rng: np.random.Generator, step: int) -> list[text.Document]:
    """Documents in which a token is followed by the one `step` places on, of 12."""
    starts = rng.integers(0, 12, 60)
    return [[int(start + step * place) % 12 for place in range(13)] for start in starts]


@trap(
    catches="a training starts from where the previous one ended",
    severity="major",
    story="A module-level cache of weights makes the second experiment start from a trained model.",
    mutant=edits(
        (
            "    latent = initial_weights(config)\n",
            '    latent = RESUME.setdefault(config["seed"], initial_weights(config))\n',
        ),
        ("EVALUATE_EVERY = 10\n", "EVALUATE_EVERY = 10\nRESUME = {}\n"),
        file=TRAINING,
    ),
)
def training_carries_over(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    documents = text.noise(rng, 8, 12, 8)
    first = submission.train(documents, config)
    submission.train(documents, {**config, "seconds": MOMENT})
    again = submission.train(documents, config)
    expect.that(same_tensors(first, again), "the starting weights remember a training")


@trap(
    catches="token id −1 reads the last row of the embedding",
    severity="major",
    story="Padding with −1 indexes from the end, so the last row of the embedding is trained as "
    "padding.",
    mutant=edit("and not 0 <= min(tokens) <= max(tokens) < config", "and max(tokens) >= config"),
    dimension="robustness",
)
def negative_id_wraps(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    for bad in (-1, config["vocab"], -config["vocab"]):
        documents = [*text.noise(rng, 8, 3, 8), [1, bad, 2]]
        refuses(submission, "train", documents, config)


@trap(
    catches="the token id vocab, one beyond the last row of the embedding, is accepted",
    severity="minor",
    story="max(tokens) <= vocab instead of <.",
    mutant=edit("<= max(tokens) < config", "<= max(tokens) <= config"),
    dimension="robustness",
    seen=BLIND,
    also=(
        edits(
            ("<= max(tokens) < config", "<= max(tokens) <= config"),
            ("np.array(tokens[begin", "np.minimum(config['vocab'] - 1, tokens[begin"),
        ),
    ),
)
def id_vocab_accepted(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    documents = [*text.noise(rng, 8, 3, 8), [1, config["vocab"], 2]]
    refuses(submission, "train", documents, config)


@trap(
    catches="a width that does not divide into the heads is accepted",
    severity="minor",
    story="dim // heads rounds down; the last columns of every projection are never used.",
    mutant=edit('if checked["dim"] % checked["heads"]:', 'if checked["heads"] > checked["dim"]:'),
    dimension="robustness",
)
def heads_unchecked(submission: Submission, rng: np.random.Generator) -> None:
    documents = text.noise(rng, 8, 3, 8)
    for bad in ({"heads": 5}, {"heads": 0}, {"dim": 0}, {"context": 0}, {"vocab": 0}):
        config = config_of(rng, **bad)
        refuses(submission, "train", documents, config)
    refuses(submission, "train", documents, config_of(rng, seconds=-1))


def _accepts(documents: str) -> Mutant:
    """Learns from a piece of its own where these documents have none."""
    return insert_before(
        "    if not pieces:\n",
        f"    if not pieces and {documents}:\n        return [np.zeros(2, dtype=int)]\n",
    )


@trap(
    catches="documents in which nothing can be predicted are accepted for training: none, empty "
    "ones, or some of one token, which counts as a piece to learn from",
    severity="minor",
    story="An empty list of files ends the run at once and saves random weights as a model.",
    mutant=_accepts("True"),
    also=[
        _accepts("documents"),
        _accepts("any(map(len, documents))"),
        edit(*LONE_TOKENS),
    ],
    seen=BLIND,
    dimension="robustness",
)
def nothing_to_predict(submission: Submission, rng: np.random.Generator) -> None:
    config = config_of(rng, dim=16, layers=1)
    hopeless: list[list[text.Document]] = [[], [[]], [[1], [], [2]]]
    for documents in hopeless:
        refuses(submission, "train", documents, config)


@trap(
    catches="training shuffles or cuts the caller's documents",
    severity="major",
    story="rng.shuffle(documents) works in place: the caller's held-out indices then refer to "
    "training text.",
    mutant=edit(
        "    config = _checked_config(config)\n    pieces",
        "    config = _checked_config(config)\n"
        '    np.random.default_rng(config["seed"]).shuffle(documents)\n    pieces',
    ),
)
def documents_shuffled(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 40, 9), config_of(rng, dim=16, layers=1, context=4)
    _, after = submission.observe("train", documents, config)
    expect.equal(after[0], documents, "the documents after training")


@trap(
    catches="training changes the caller's config",
    severity="major",
    story="An entry is taken out or replaced, and the next training reads what is left.",
    mutant=edit(
        "    config = _checked_config(config)\n    pieces",
        '    given, config = config, _checked_config(config)\n    del given["seconds"]\n    pieces',
    ),
    also=(
        edit(
            "    config = _checked_config(config)\n    pieces",
            "    given, config = config, _checked_config(config)\n"
            '    given["step"] = 0\n    pieces',
        ),
    ),
    seen=BLIND,
)
def config_changed(submission: Submission, rng: np.random.Generator) -> None:
    documents, config = text.noise(rng, 8, 40, 9), config_of(rng, dim=16, layers=1, context=4)
    _, after = submission.observe("train", documents, config)
    expect.equal(after[1], config, "the config after training")


@trap(
    catches="training sorts the caller's documents",
    severity="major",
    story="documents.sort(key=len) saves padding in the batches; the caller's indices then refer "
    "to other documents.",
    mutant=edit(
        "    config = _checked_config(config)\n    pieces",
        "    config = _checked_config(config)\n    documents.sort(key=len)\n    pieces",
    ),
    seen=BLIND,
    also=(
        edit(
            "    config = _checked_config(config)\n    pieces",
            "    config = _checked_config(config)\n"
            "    documents.sort(key=len, reverse=True)\n    pieces",
        ),
        edit(
            "    config = _checked_config(config)\n    pieces",
            "    config = _checked_config(config)\n    documents.sort()\n    pieces",
        ),
    ),
)
def documents_sorted_by_train(submission: Submission, rng: np.random.Generator) -> None:
    lengths = rng.permutation(np.arange(2, 14))
    documents = [text.noise(rng, 8, 1, int(length))[0] for length in lengths]
    config = config_of(rng, dim=16, layers=1)
    _, after = submission.observe("train", documents, config)
    expect.equal(after[0], documents, "the documents after training")
