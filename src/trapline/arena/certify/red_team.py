"""The standing red team: hostile submissions, none of which may succeed.

The corpus of a track is a folder of single files, .py or .cu. Each starts with a header of
comments (in a .cu file with // for #):

    # attack: what it tries                 # defence: what stops it
    # expect: the state it must end in      # at-most: dimension=score, where it solves the task
    # needs: cgroup                         (left out where the machine lacks it: a control group
                                            that counts memory; `pids`: a limit on the number of
                                            processes; a `gpu`, or `nvcc`; `stand-in`: left out on a
                                            GPU)
    # slow: yes                             (costs deadlines, not computation)

and exactly one line about whether it could succeed at all:

    # succeeds-at: process                  (a level at which it does; tests prove it)
    # succeeds-without: defence …           (it does once these are switched off; tests prove it)
    # never-because: why no test shows it   (unsafe, or it cannot work by construction)

The rest is `solution.py` or `solution.cu`; a line `# ==== file: NAME` starts another file of the
submission.
A header may also name code that attacks share, such as an honest answer to the rest of the task:

    # uses: inversions channel              (fragments/NAME.py, put before the attack's own code)
"""

import hashlib
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast, get_args

from trapline.arena.certify.gpu_race import race
from trapline.arena.challenge import Challenge
from trapline.arena.errors import MissingError, UsageError
from trapline.arena.gpu.memory import device_here
from trapline.arena.gpu.opening import machine_facts, why_not_gradable
from trapline.arena.gpu.runner import find_nvcc
from trapline.arena.judge.grade import grade
from trapline.arena.judge.request import GradeRequest
from trapline.arena.process.isolation import cgroups
from trapline.arena.process.sandbox import bounds_processes, scratch_folder
from trapline.arena.record import Cell, Dimension, Level, Record, State, Track
from trapline.arena.runs.executor import run_all

#: Track → the corpus, and beside it the challenge that it attacks: small, so that a hundred attacks
#: take minutes.
CORPORA: dict[Track, str] = {"cpu": "cheats", "gpu": "gpu_cheats"}
CHALLENGES: dict[Track, str] = {"cpu": "ordering", "gpu": "scaling/gpu"}
#: The last campaign (`certify --red-team --json`).
PUBLISHED_RED_TEAM = Path(__file__).with_name("data") / "red-team.json"
_FIELD = re.compile(r"(?:#|//) ([a-z-]+): (.+)")
_NEXT_FILE = re.compile(r"^# ==== file: (.+)\n", re.MULTILINE)
_DIGEST = "{digest of solution.py}"
_SUFFIXES = (".py", ".cu")
#: Too long to lie in a file: `read_cheat` writes it out.
_LONG, _LENGTH = "{half a megabyte}", 1 << 19
_NEEDED = {"attack", "defence", "expect"}
_PROOFS = {"succeeds-at", "succeeds-without", "never-because"}
_KNOWN = {*_NEEDED, *_PROOFS, "at-most", "needs", "slow", "uses"}


@dataclass(frozen=True)
class Cheat:
    name: str
    attack: str
    defence: str
    expect: State
    #: The most it may get where it does solve the task: dimension → score.
    at_most: dict[str, float]
    #: Levels at which it succeeds.
    succeeds_at: tuple[str, ...]
    #: Defences without which it succeeds, all of them switched off.
    succeeds_without: tuple[str, ...]
    never_because: str
    needs: str
    slow: bool
    files: dict[str, str]

    @property
    def proof(self) -> str:
        if self.succeeds_at:
            return f"succeeds at level {', '.join(self.succeeds_at)}"
        if self.succeeds_without:
            return f"succeeds without {', '.join(self.succeeds_without)}"
        return f"not shown: {self.never_because}"


class Attempt(Record):
    name: str
    attack: str
    defence: str
    expect: State
    state: State
    score: float | None
    reason: str
    #: What shows that it is a real attack: when it does succeed.
    proof: str = ""
    #: Empty, or what it got that it does not deserve.
    gained: str = ""

    @property
    def surprising(self) -> bool:
        """Whether it gained something, or ended in another state than its header says."""
        return bool(self.gained) or self.state != self.expect


class RedTeam(Record):
    level: Level
    track: Track = "cpu"
    #: Of the GPU track: the GPU, or what stands in for it.
    gpu: str = ""
    seed: int
    attempts: list[Attempt]
    #: Attacks left out, with the reason.
    left_out: dict[str, str]
    #: Honest submissions, graded in the same campaign: name → state.
    honest: dict[str, State]

    @property
    def succeeded(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.gained]

    def holds(self) -> bool:
        """No attack gained anything, each ended as expected, and honest submissions passed."""
        stopped = not any(attempt.surprising for attempt in self.attempts)
        return stopped and all(state == "pass" for state in self.honest.values())


def find_corpus(track: Track = "cpu") -> Path:
    """The folder with the attacks: part of the source checkout, not of an installation."""
    folder = Path(__file__).resolve().parents[4] / "tests" / "arena" / CORPORA[track]
    if not folder.is_dir():
        raise MissingError(
            f"the red team's attacks come with the source checkout (tests/arena/{CORPORA[track]}), "
            "and this is an installation without them"
        )
    return folder


def read_corpus(folder: Path) -> list[Cheat]:
    return [read_cheat(path) for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES]


def read_cheat(path: Path) -> Cheat:
    text = path.read_text(encoding="utf-8")
    header = text.partition("\n\n")[0].splitlines()
    fields = {found[1]: found[2] for line in header if (found := _FIELD.match(line))}
    wrong = (_NEEDED - set(fields)) | (set(fields) - _KNOWN)
    if wrong:
        raise UsageError(f"{path}: its header lacks or misspells {', '.join(sorted(wrong))}")
    if len(_PROOFS & set(fields)) != 1:
        raise UsageError(f"{path}: its header needs exactly one of {', '.join(sorted(_PROOFS))}")
    pairs = [pair.split("=") for pair in fields.get("at-most", "").split()]
    return Cheat(
        name=path.stem,
        attack=fields["attack"],
        defence=fields["defence"],
        expect=_state(path, fields["expect"]),
        at_most={name: float(value) for name, value in pairs},
        succeeds_at=tuple(fields.get("succeeds-at", "").split()),
        succeeds_without=tuple(fields.get("succeeds-without", "").split()),
        never_because=fields.get("never-because", ""),
        needs=fields.get("needs", ""),
        slow="slow" in fields,
        files=_files(text, _fragments(path, fields.get("uses", "")), f"solution{path.suffix}"),
    )


def _state(path: Path, text: str) -> State:
    for state in get_args(State):
        if text == state:
            return cast(State, state)
    raise UsageError(f"{path}: {text!r} is not a state; states are {', '.join(get_args(State))}")


def _fragments(path: Path, names: str) -> str:
    """The shared code that an attack's header names."""
    try:
        paths = [path.parent / "fragments" / (name + path.suffix) for name in names.split()]
        return "\n\n".join(fragment.read_text(encoding="utf-8") for fragment in paths)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: {error.filename}, which its header uses, is missing") from None


def _files(text: str, fragments: str, main: str) -> dict[str, str]:
    attack, *rest = _NEXT_FILE.split(text)
    header, _, own = attack.partition("\n\n")
    solution = f"{header}\n\n{fragments}\n\n{own}" if fragments else attack
    others = dict(zip(rest[::2], rest[1::2], strict=True))
    digest = hashlib.sha256(solution.encode()).hexdigest()
    filled = {
        name: content.replace(_DIGEST, digest).replace(_LONG, "#" * _LENGTH)
        for name, content in others.items()
    }
    return {main: solution, **filled}


def load_challenge(corpus: Path, track: Track = "cpu") -> Challenge:
    parent = str(corpus.resolve().parent)
    if parent not in sys.path:
        sys.path.append(parent)
    name = CHALLENGES[track]
    return Challenge(corpus.parent / name, name.replace("/", "."))


def run_red_team(
    level: Level,
    track: Track = "cpu",
    *,
    corpus: Path | None = None,
    names: Sequence[str] | None = None,
    seed: int | None = None,
    workers: int | None = None,
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
) -> RedTeam:
    """Grades every attack, and honest submissions beside them."""
    if level == "process":
        raise MissingError("these attacks are real: they are not run in a plain process")
    if track == "gpu" and (reason := why_not_gradable()):
        raise MissingError(reason)
    folder = find_corpus(track) if corpus is None else corpus
    challenge = load_challenge(folder, track)
    seed = secrets.randbits(32) if seed is None else seed
    cheats = [cheat for cheat in read_corpus(folder) if names is None or cheat.name in names]
    left_out = {cheat.name: why for cheat in cheats if (why := _why_left_out(cheat))}
    tried = [cheat for cheat in cheats if cheat.name not in left_out]
    attempts = []
    work = partial(attempt, challenge=challenge, level=level, seed=seed)
    for _, result in run_all(work, tried, 1 if track == "gpu" else workers):
        attempts.append(result)
        on_attempt(result)
    attempts.sort(key=lambda one: one.name)
    honest = {
        path.name: _grade(path, challenge, level, seed).state
        for path in (challenge.solution, *challenge.alternates)
        if (path / "solution.py").exists() or device_here() == "cuda"
    }
    return RedTeam(
        level=level,
        track=track,
        gpu=machine_facts().get("gpu", "") if track == "gpu" else "",
        seed=seed,
        attempts=attempts,
        left_out=left_out,
        honest=honest,
    )


def attempt(cheat: Cheat, challenge: Challenge, level: Level, seed: int) -> Attempt:
    """Grades one attack like any other submission, and looks at what it gained."""
    with scratch_folder() as name:
        for path, content in cheat.files.items():
            Path(name, path).write_text(content, encoding="utf-8")
        cell = _grade(Path(name), challenge, level, seed, cheat.name)
        if challenge.track == "gpu" and "speed" in cheat.at_most:
            cell = _raced(cell, challenge, Path(name), level)
    return Attempt(
        name=cheat.name,
        attack=cheat.attack,
        defence=cheat.defence,
        expect=cheat.expect,
        state=cell.state,
        score=cell.score,
        reason=cell.reason,
        proof=cheat.proof,
        gained=_gain(cheat, cell),
    )


def _grade(
    folder: Path, challenge: Challenge, level: Level, seed: int, name: str = "honest"
) -> Cell:
    request = GradeRequest(
        name, challenge.id, 1, folder, level=level, seed=seed, track=challenge.track
    )
    return grade(request, challenge).cell


def _raced(cell: Cell, challenge: Challenge, folder: Path, level: Level) -> Cell:
    """The cell with the speed of a race; a wrong answer has none."""
    wrong = Dimension(score=0.0, reason="the contract does not hold, so its time means nothing")
    speed = race(challenge, folder, level) if cell.state == "pass" else wrong
    return cell.model_copy(update={"dimensions": {**cell.dimensions, "speed": speed}})


def _gain(cheat: Cheat, cell: Cell) -> str:
    """What it got that it does not deserve."""
    if cell.state in ("infra_error", "not_run"):
        return f"it kept the judge from judging: {cell.reason}"
    try:
        cell.model_dump_json()
    except ValueError as error:
        return f"its verdict cannot be written: {error}"
    if cell.state == "pass" and cheat.expect != "pass":
        return f"it passed with {cell.score}"
    for name, most in cheat.at_most.items():
        score = cell.dimensions[name].score
        if score is None or score > most:
            return f"{name} is {score}, more than the {most:g} it deserves"
    return ""


def _why_left_out(cheat: Cheat) -> str:
    if cheat.needs == "cgroup" and not cgroups.counts_memory():
        return "this machine lends no control group that counts memory"
    if cheat.needs == "pids" and not bounds_processes("landlock", gpu=device_here() == "cuda"):
        return "this machine does not limit the number of root's processes"
    if cheat.needs == "gpu" and device_here() != "cuda":
        return "it needs a GPU"
    if cheat.needs == "nvcc" and find_nvcc() is None:
        return "it needs nvcc"
    if cheat.needs == "stand-in" and device_here() == "cuda":
        return "it attacks what stands in for a GPU"
    return ""


#: How the page is written, and where the proofs are.
_PAGES: dict[Track, tuple[str, tuple[str, ...]]] = {
    "cpu": (
        "--write docs/red-team.md",
        (
            "a defence is switched off (`tests/arena/certify/test_defences.py`, by the names of",
            "`tests/arena/certify/switches.py`) or in a plain process",
            "(`tests/arena/certify/test_red_team.py`).",
        ),
    ),
    "gpu": (
        "--track gpu --write PAGE",
        (
            "a defence is switched off (`tests/arena/gpu/test_attacks.py`, by the names of",
            "`tests/arena/gpu/gpu_switches.py`) or in a plain process.",
        ),
    ),
}


def markdown(team: RedTeam) -> str:
    command, proofs = _PAGES[team.track]
    passing = sum(state == "pass" for state in team.honest.values())
    lines = [
        "# Red team" if team.track == "cpu" else "# Red team of the GPU track",
        "",
        "Hostile submissions, graded like any other. An attack succeeds when it passes, or gets",
        "more than it deserves, or keeps the judge from judging. How they are kept in:",
        "[security](security.md).",
        "",
        "The last column says how we know that an attack is a real one: where it does succeed once",
        *proofs,
        "",
        f"Written by `trapline certify --red-team {command}`; do not edit.",
        "",
        f"- Isolation level: `{team.level}`, seed {team.seed}.",
        *([f"- GPU: {team.gpu}."] if team.gpu else []),
        f"- **Attack success: {len(team.succeeded)} of {len(team.attempts)}**.",
        f"- Honest submissions that pass: {passing} of {len(team.honest)}.",
        *(f"- Not tried: `{name}` ({why})." for name, why in team.left_out.items()),
        "",
        "| attack | what it tries | what stops it | verdict | shown to be real |",
        "|---|---|---|---|---|",
        *(_row(one) for one in team.attempts),
    ]
    return "\n".join(lines) + "\n"


def _row(one: Attempt) -> str:
    verdict = f"**gained: {one.gained}**" if one.gained else one.state
    cells = (f"`{one.name}`", one.attack, one.defence, verdict, one.proof)
    return f"| {' | '.join(text.replace('|', '/') for text in cells)} |"
