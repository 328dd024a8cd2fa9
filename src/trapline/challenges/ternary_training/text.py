"""Training data: a grammar drawn anew for every run, and a small text written for this project.

The grammar is a Markov chain over word classes. One class holds names: the first name of a document
returns wherever a name is due, so that a model gains by looking further back than one token. The
true probability of every token is known.
"""

from bisect import bisect_right
from functools import cache
from importlib.resources import files
from itertools import pairwise

import numpy as np

Document = list[int]
CLASSES = 8
NAMES = 0


class Grammar:
    """Word classes, which may follow which, and how likely each word of a class is."""

    def __init__(self, rng: np.random.Generator, vocab: int) -> None:
        self.vocab = vocab
        words = rng.permutation(vocab)
        self.words = np.array_split(words, CLASSES)
        self.class_of = np.empty(vocab, dtype=int)
        for number, members in enumerate(self.words):
            self.class_of[members] = number
        self.follow = _transitions(rng)
        self.share = [_falling(len(members)) for members in self.words]
        # Thousands of words are drawn: `choice` would make these sums for each.
        self._to_class = [_up_to(shares) for shares in self.follow]
        self._to_word = [_up_to(shares) for shares in self.share]

    def document(self, rng: np.random.Generator, length: int) -> Document:
        """`length` tokens, beginning with a name."""
        name = int(rng.choice(self.words[NAMES]))
        tokens, current = [name], NAMES
        for _ in range(length - 1):
            current = _drawn(rng, self._to_class[current])
            tokens.append(name if current == NAMES else self._word(rng, current))
        return tokens

    def documents(self, rng: np.random.Generator, count: int, longest: int) -> list[Document]:
        """Documents of different lengths, none shorter than half the longest."""
        lengths = rng.integers(longest // 2, longest + 1, count)
        return [self.document(rng, int(length)) for length in lengths]

    def log_probs(self, document: Document) -> np.ndarray:
        """The true log-probability of every token but the first, given those before it."""
        name = document[0]
        found = []
        for before, token in pairwise(document):
            group = self.class_of[token]
            word = float(token == name) if group == NAMES else self._share_of(token)
            found.append(np.log(self.follow[self.class_of[before], group] * word))
        return np.array(found)

    def _word(self, rng: np.random.Generator, group: int) -> int:
        return int(self.words[group][_drawn(rng, self._to_word[group])])

    def _share_of(self, token: int) -> float:
        group = self.class_of[token]
        place = int(np.flatnonzero(self.words[group] == token)[0])
        return float(self.share[group][place])


def _up_to(shares: np.ndarray) -> list[float]:
    """The share of each place and all before it."""
    sums = shares.cumsum()
    found: list[float] = (sums / sums[-1]).tolist()
    return found


def _drawn(rng: np.random.Generator, up_to: list[float]) -> int:
    """The place that `rng.choice` would draw with these shares."""
    return bisect_right(up_to, rng.random())


def noise(rng: np.random.Generator, vocab: int, count: int, length: int) -> list[Document]:
    """Documents without any structure: every token is equally likely everywhere."""
    return [[int(token) for token in row] for row in rng.integers(0, vocab, (count, length))]


def renamed_two_back(
    rng: np.random.Generator, vocab: int, count: int, longest: int
) -> list[Document]:
    """Each token is the one two places back under another name, but for one in twenty."""
    names = rng.permutation(vocab)

    def document(length: int) -> Document:
        tokens = [int(token) for token in rng.integers(0, vocab, 2)]
        while len(tokens) < length:
            rule, chance = int(names[tokens[-2]]), int(rng.integers(vocab))
            tokens.append(chance if rng.random() < 0.05 else rule)
        return tokens

    return [document(int(length)) for length in rng.integers(longest // 2, longest + 1, count)]


def recalled(rng: np.random.Generator, vocab: int, count: int, longest: int) -> list[Document]:
    """A marker, which is every second token or so, is followed by the document's first token."""
    marker, *others = (int(token) for token in rng.permutation(vocab))
    first, rest = others[4:], others[:4]

    def document(length: int) -> Document:
        tokens = [int(rng.choice(first))]
        while len(tokens) < length:
            free = marker if rng.random() < 0.5 else int(rng.choice(rest))
            tokens.append(tokens[0] if tokens[-1] == marker else free)
        return tokens

    return [document(int(length)) for length in rng.integers(longest // 2, longest + 1, count)]


def ends_with_its_first(
    rng: np.random.Generator, vocab: int, count: int, length: int
) -> list[Document]:
    """Noise, then a marker, then the document's first token once more."""
    marker = vocab - 1
    return [[*tokens, marker, tokens[0]] for tokens in noise(rng, marker, count, length - 2)]


def unigram_perplexity(train: list[Document], judged: list[Document], vocab: int) -> float:
    """What counting words, one added to each, reaches on the judged documents."""
    counts = np.ones(vocab)
    for document in train:
        np.add.at(counts, np.asarray(document[1:], dtype=int), 1.0)
    log_share = np.log(counts / counts.sum())
    targets = np.concatenate([np.asarray(document[1:], dtype=int) for document in judged])
    return float(np.exp(-np.mean(log_share[targets])))


@cache
def prose(first: int) -> tuple[list[Document], int]:
    """The shipped text and the size of its alphabet: a line a document, a letter a token.

    Token ids begin at `first`.
    """
    lines = files(__package__).joinpath("prose.txt").read_text(encoding="utf-8").splitlines()
    alphabet = {letter: first + place for place, letter in enumerate(sorted(set("".join(lines))))}
    return [[alphabet[letter] for letter in line] for line in lines if line], len(alphabet)


def _transitions(rng: np.random.Generator) -> np.ndarray:
    """(from, to): a ring through all classes, so that each is reached, and a shortcut each."""
    ring = rng.permutation(CLASSES)
    follow = np.zeros((CLASSES, CLASSES))
    for place, group in enumerate(ring):
        follow[group, ring[(place + 1) % CLASSES]] = 0.7
        follow[group, ring[(place + int(rng.integers(2, CLASSES))) % CLASSES]] = 0.3
    return follow


def _falling(count: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, count + 1)
    shares: np.ndarray = weights / weights.sum()
    return shares
