"""Profiles: a challenge as another prompt states it, in `profiles/<name>/profile.toml`.

A profile takes part of the challenge's own contract (its `scope`), or brings a rule of its own:
`cases.py`, `traps.py` and `solution/` beside `profile.toml`, or adds to the challenge's own prompt
pseudo-code with a planted flaw and a golden test that is right.
"""

import tomllib
from pathlib import Path

from pydantic import Field, ValidationError

from trapline.arena.errors import UsageError
from trapline.arena.record import Record
from trapline.arena.scope import WHOLE, Scope

FOLDER = "profiles"
PLAN = "profile.toml"
#: Maps the contract's calls to an answer's own functions; beside the answer.
ADAPTER, CUDA_ADAPTER = "adapter.py", "adapter.cu"
#: A faultless answer to the profile's prompt, with its adapter; a rule of its own has `solution`.
CONTROL = "control"
#: The profile of prompts with a planted flaw.
FLAWED = "flawed"
#: What such a profile adds to the prompt; the module has `check(solution)`.
PSEUDOCODE, GOLDEN = "pseudocode.md", "golden"
#: Figures of an answer that reports print too: `figures(submission, rng)`, by quantity.
FIGURES = "figures"
PREVAILS = (
    "This sketch is not part of the contract and may contain mistakes. The golden test below is "
    "right: where the two disagree, the golden test prevails."
)


class EntrySigns(Record):
    """How to recognise one of the functions or classes that the prompt asks for."""

    #: Regular expressions; the whole name must match one of them, whatever its case.
    names: list[str] = Field(min_length=1)
    #: Parameters of which at least this many must occur, by lower-case name.
    parameters: list[str] = []
    least: int = 0


class TaskSigns(Record):
    """How `trapline adopt` recognises an answer to this prompt without running it."""

    #: Words of the task folder's name, in any order of preference.
    folders: list[str] = []
    #: Regular expressions; a prompt that matches all of them states this task.
    prompt: list[str] = []
    #: Entry point of the adapter's template → what it looks like in an answer.
    entries: dict[str, EntrySigns] = {}


class FlawPlan(Record):
    """One wrong line in the pseudo-code of a prompt."""

    #: What is wrong with it, in one sentence.
    name: str
    #: The trap whose mutant does what the pseudo-code says.
    mutant: str
    #: A trap whose mutant is another bug of the same function.
    another: str


class ProfilePlan(Record):
    """`profile.toml`, whole."""

    summary: str
    #: What an answer's adapter provides; the challenge's entry points if empty.
    entry_points: list[str] = []
    #: Capabilities of the challenge that the prompt asks for.
    scope: list[str] = []
    #: Relative error that the prompt allows.
    tolerance: float = 0.0
    #: Why answers to this prompt cannot be executed; empty where they can.
    not_run: str = ""
    weights: dict[str, float] = {}
    recognise: TaskSigns = TaskSigns()
    #: Makes this the challenge's whole contract under a flawed prompt.
    flaw: FlawPlan | None = None


class Profile:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.plan = _read_plan(folder / PLAN)

    @property
    def has_rule(self) -> bool:
        """Whether it is judged by a rule of its own instead of by part of the contract."""
        return (self.folder / "cases.py").is_file()

    @property
    def has_figures(self) -> bool:
        return (self.folder / f"{FIGURES}.py").is_file()

    @property
    def scope(self) -> Scope:
        if self.plan.flaw is not None:
            return WHOLE
        return Scope(frozenset(self.plan.scope), self.plan.tolerance)

    def prompt(self, own: str) -> str:
        """The challenge's own prompt with a flawed sketch; another prompt is its summary alone."""
        if self.plan.flaw is None:
            return self.plan.summary
        sketch = (self.folder / PSEUDOCODE).read_text(encoding="utf-8")
        golden = (self.folder / f"{GOLDEN}.py").read_text(encoding="utf-8")
        return (
            f"{own}\n## Pseudo-code\n\n{PREVAILS}\n\n{sketch}\n## Golden test\n\n"
            f"Saved as `golden.py` beside `solution.py`, it runs with `python golden.py`.\n\n"
            f"```python\n{golden}```\n"
        )

    @property
    def template(self) -> Path:
        """The adapter for answers whose functions have the names of the prompt."""
        cuda = self.folder / CUDA_ADAPTER
        return cuda if cuda.is_file() else self.folder / ADAPTER


def profile_names(challenge: Path) -> list[str]:
    """The profiles in a challenge's folder."""
    return sorted(path.parent.name for path in (challenge / FOLDER).glob(f"*/{PLAN}"))


def read_profile(challenge: Path, name: str) -> Profile:
    """The profile of this name, or a `UsageError` that names the ones there are."""
    known = profile_names(challenge)
    if name not in known:
        there = f"its profiles are: {', '.join(known)}" if known else "it has no profiles"
        raise UsageError(f"{challenge.name} has no profile {name!r}; {there}")
    return Profile(challenge / FOLDER / name)


def _read_plan(path: Path) -> ProfilePlan:
    try:
        return ProfilePlan.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}: {first['msg']}") from None
