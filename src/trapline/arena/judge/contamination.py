"""Finds hidden material of the judge, or another entrant's work, in a submission.

Pure functions over texts. Three signs: the canary and the hidden names of traps, the judge's own
sentences (stories, what a trap catches), and passages of the gold answer, of its alternates, of
cases and traps, or of another entrant. Text of the prompt and the starter does not count.

A passage is a run of `SHINGLE` tokens. Independent answers to one challenge share up to 12 % of
theirs (measured over the example field and all alternates); copies share nearly all.
"""

import ast
import itertools
import re
import uuid
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path

from trapline.arena.challenge import DEPLOYED, Challenge
from trapline.arena.record import Record

SHINGLE = 16
#: Consecutive words of a judge's sentence that do not occur by chance.
SENTENCE = 9
COPY_SHARE = 0.25
FEWEST_SHARED = 60
#: Names of three words or more count alone; shorter ones are ordinary words and count together.
SHORT_NAMES_TOGETHER = 4

_TOKEN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+|[^\sA-Za-z0-9_]")
_WORD = re.compile(r"[a-z0-9]+")
_KEBAB = re.compile(r"(?<![\w-])[a-z0-9]+(?:-[a-z0-9]+)+(?![\w-])")
_NAMESPACE = uuid.UUID("5b0c2c1e-3a39-5d0f-9a43-0f0c5c9c7d11")

Shingles = frozenset[int]


class Leak(Record):
    #: canary, trap-name, judge-text, gold, or copy.
    kind: str
    #: Where the same thing stands: a hidden file, an alternate, another entrant.
    source: str
    #: The share of passages in common, where passages were compared.
    share: float | None = None
    detail: str


def canary(challenge_id: str) -> str:
    """A line that stands in hidden files and in exported tasks, and nowhere else."""
    return f"trapline canary {uuid.uuid5(_NAMESPACE, challenge_id)}"


def shingles(text: str) -> Shingles:
    """Fingerprints of every run of tokens; layout does not matter."""
    tokens = _TOKEN.findall(text)
    return frozenset(
        hash(tuple(tokens[place : place + SHINGLE])) for place in range(len(tokens) - SHINGLE + 1)
    )


def share(one: Shingles, other: Shingles) -> float:
    """How much of the smaller stands in the larger; 0 where too little is shared to say."""
    common = len(one & other)
    return common / min(len(one), len(other)) if common >= FEWEST_SHARED else 0.0


class Hidden:
    """What only the judge of one challenge has, as fingerprints."""

    def __init__(self, challenge: Challenge) -> None:
        self._challenge = challenge
        self.canary = canary(challenge.id)
        self.names = frozenset(trap.id for trap in challenge.traps)
        prompt, starter = (challenge.folder / name for name in DEPLOYED)
        self._public_text = "\n".join(
            [
                prompt.read_text(encoding="utf-8"),
                *(path.read_text(encoding="utf-8") for path in sorted(starter.rglob("*.py"))),
            ]
        )
        self.public = shingles(self._public_text)

    @cached_property
    def sentences(self) -> dict[int, str]:
        """Runs of words from the traps' own prose → the trap they belong to."""
        public = set(_word_runs(self._public_text))
        return {
            run: trap.id
            for trap in self._challenge.traps
            for text in (trap.story, trap.catches)
            for run in _word_runs(text)
            if run not in public
        }

    @cached_property
    def answers(self) -> dict[str, Shingles]:
        gold = {"the gold answer": self._challenge.solution}
        others = {f"the alternate {path.name}": path for path in self._challenge.alternates}
        return {name: self._own(_texts(path)) for name, path in (gold | others).items()}

    @cached_property
    def judge_files(self) -> dict[str, Shingles]:
        """Cases, traps and what they are made of, without what the gold answer says too."""
        gold = self.answers["the gold answer"]
        paths = self._challenge.judge_modules
        return {
            path.name: self._own([_without_mutants(path.read_text(encoding="utf-8"))]) - gold
            for path in paths
            if path.stem != "__init__"
        }

    def _own(self, texts: Iterable[str]) -> Shingles:
        return shingles("\n".join(texts)) - self.public

    def less_public(self, text: str) -> Shingles:
        return shingles(text) - self.public


def _without_mutants(source: str) -> str:
    """A trap file without the edits of its mutants, which mostly repeat the gold answer."""
    text = source.encode()
    # `ast.get_source_segment` splits the whole text into lines for each node.
    lines = [0, *itertools.accumulate(len(line) + 1 for line in text.split(b"\n"))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "mutant":
            end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
            start = lines[node.lineno - 1] + node.col_offset
            source = source.replace(text[start : lines[end_line - 1] + end].decode(), "")
    return source


@cache
def hidden(challenge: Challenge) -> Hidden:
    return Hidden(challenge)


def leaks_in(text: str, known: Hidden) -> list[Leak]:
    found = [*_canaries(text, known), *_names(text, known), *_sentences(text, known)]
    own = known.less_public(text)
    for source, passages in known.answers.items():
        found += _shared("gold", source, own, passages)
    for source, passages in known.judge_files.items():
        found += _shared("judge-text", source, own, passages, least=0.0)
    return found


def evidence(challenge: Challenge, texts: Mapping[str, str]) -> list[dict[str, object]]:
    """What a cell keeps: the leaks of its own submission, ready for JSON."""
    return [leak.model_dump() for leak in leaks_in(joined(texts), hidden(challenge))]


def joined(texts: Mapping[str, str]) -> str:
    """A submission as one text; the prompt in it is ours."""
    return "\n".join(text for name, text in sorted(texts.items()) if name != "prompt.md")


def copies(entrants: Mapping[str, str], known: Hidden) -> list[tuple[str, str, float]]:
    """Pairs of entrants whose answers to one challenge are near-copies, with the share."""
    own = {name: known.less_public(text) for name, text in sorted(entrants.items())}
    pairs = [(one, other, share(own[one], own[other])) for one, other in combinations(own, 2)]
    return [pair for pair in pairs if pair[2] >= COPY_SHARE]


def _canaries(text: str, known: Hidden) -> list[Leak]:
    if known.canary.split()[-1] not in text:
        return []
    return [Leak(kind="canary", source="hidden files", detail="the canary stands in the text")]


def _names(text: str, known: Hidden) -> list[Leak]:
    """In the judge's own spelling only: the same words in another form are ordinary."""
    said = sorted(known.names & set(_KEBAB.findall(text)))
    telling = [name for name in said if name.count("-") >= 2]
    if not telling and len(said) < SHORT_NAMES_TOGETHER:
        return []
    return [Leak(kind="trap-name", source="traps.py", detail=", ".join(said[:8]))]


def _sentences(text: str, known: Hidden) -> list[Leak]:
    traps = sorted({known.sentences[run] for run in _word_runs(text) if run in known.sentences})
    if not traps:
        return []
    detail = f"sentences about {', '.join(traps[:8])}"
    return [Leak(kind="judge-text", source="traps.py", detail=detail)]


def _shared(
    kind: str, source: str, own: Shingles, passages: Shingles, least: float = COPY_SHARE
) -> list[Leak]:
    common = len(own & passages)
    part = share(own, passages)
    if common < FEWEST_SHARED or part < least:
        return []
    detail = f"{common} passages of {SHINGLE} tokens in common"
    return [Leak(kind=kind, source=source, share=round(part, 3), detail=detail)]


def _word_runs(text: str) -> list[int]:
    words = _WORD.findall(text.lower())
    return [
        hash(tuple(words[place : place + SENTENCE])) for place in range(len(words) - SENTENCE + 1)
    ]


def _texts(folder: Path) -> list[str]:
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".md"))
    return [path.read_text(encoding="utf-8") for path in paths]
