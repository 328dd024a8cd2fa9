"""A challenge as the arena sees it: a folder with data, prompt, cases and traps."""

import hashlib
import importlib
import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Literal

from pydantic import Field, ValidationError

from trapline.arena.errors import UsageError
from trapline.arena.gpu.contract import HEADER
from trapline.arena.gpu.memory import device_here
from trapline.arena.judge.traps import Case, Trap, collect
from trapline.arena.judge_dependencies import judge_dependencies
from trapline.arena.process.isolation.packages import is_installed
from trapline.arena.process.isolation.spec import SandboxLimits
from trapline.arena.process.session import SandboxConfig
from trapline.arena.profile import CONTROL, FOLDER, FlawPlan, Profile, profile_names, read_profile
from trapline.arena.record import Level, Record, Track
from trapline.arena.scope import REFUSALS, WHOLE, Scope
from trapline.arena.trap_set import TrapSet

Difficulty = Literal["medium", "hard", "extra hard", "research"]
#: Where a challenge keeps the GPU track's prompt, cases, traps and solutions.
GPU_FOLDER = "gpu"
#: What a deployed workspace holds; everything else in the folder stays with the judge.
DEPLOYED = ("prompt.md", "starter")


class ChallengeLimits(Record):
    """What one worker process may use."""

    call_seconds: float = 20.0
    #: For a mechanical mutant, where endless loops are common; no right answer's call takes longer.
    mutant_seconds: float = 8.0
    memory_mb: int = 2048
    processes: int = 32


class MemoryPlan(Record):
    """Over which sizes peak memory is fitted, and the largest exponent that counts as good."""

    sizes: list[int] = Field(min_length=4)
    max_exponent: float = 1.2


class SpeedPlan(Record):
    """How a speed ratio (reference time / submission time) becomes a score."""

    #: The ratio worth 100 points; a tenth of it is worth 0, logarithmically between.
    full_marks_at: float = 1.0


class ChallengePlan(Record):
    """`challenge.toml`, whole."""

    id: str
    title: str
    difficulty: Difficulty
    summary: str
    tracks: list[Track] = ["cpu"]
    entry_points: list[str] = Field(min_length=1)
    #: Packages a submission may import beside the standard library and NumPy.
    packages: list[str] = []
    #: Dotted names whose use is calling the finished thing, e.g. "scipy.special.softmax".
    forbidden: list[str] = []
    limits: ChallengeLimits = ChallengeLimits()
    memory: MemoryPlan | None = None
    speed: SpeedPlan | None = None
    weights: dict[str, float]


class Challenge:
    """One contract: the challenge's own, or the one of its profile of this name.

    The traps of a private set join the challenge's own.
    """

    def __init__(
        self, folder: Path, package: str, profile: str = "", trap_set: Path | None = None
    ) -> None:
        self.folder = folder
        self.package = package
        self.trap_set = TrapSet(trap_set) if trap_set else None
        self.profile = read_profile(folder, profile) if profile else None
        self.plan = _read_plan(folder / "challenge.toml")
        if self.profile is not None:
            self.plan = _profiled(self.plan, self.profile)

    @property
    def id(self) -> str:
        return self.plan.id

    @property
    def track(self) -> Track:
        """A GPU challenge is a folder of its own, inside the one of the same id."""
        return "gpu" if self.folder.name == GPU_FOLDER else "cpu"

    @property
    def prompt(self) -> str:
        own = (self.folder / "prompt.md").read_text(encoding="utf-8")
        if self.track == "gpu":
            own += f"\n## {HEADER.name}\n\n```c\n{HEADER.read_text(encoding='utf-8')}```\n"
        return self.profile.prompt(own) if self.profile else own

    @property
    def flaw(self) -> FlawPlan | None:
        """The flaw that the prompt of this profile has."""
        return self.profile.plan.flaw if self.profile else None

    @property
    def _narrowed(self) -> Profile | None:
        """The profile that takes only a part of the contract or brings a rule of its own."""
        return None if self.flaw is not None else self.profile

    @property
    def profile_name(self) -> str:
        """Empty for the challenge's own contract."""
        return self.profile.name if self.profile else ""

    @property
    def full_id(self) -> str:
        """The id with the profile, as in `beam_search (published)`."""
        return f"{self.id} ({self.profile_name})" if self.profile else self.id

    @property
    def not_run(self) -> str:
        """Why answers cannot be executed; empty where they can."""
        return self.profile.plan.not_run if self.profile else ""

    @property
    def scope(self) -> Scope:
        return self.profile.scope if self.profile else WHOLE

    @property
    def rule_folder(self) -> Path:
        """Where the cases, traps and the solution lie that this contract is judged by."""
        return self.profile.folder if self.profile and self.profile.has_rule else self.folder

    @property
    def solution(self) -> Path:
        return self.rule_folder / "solution"

    @property
    def control(self) -> Path:
        """A faultless answer in the form that the prompt asks for."""
        if self._narrowed is None or self._narrowed.has_rule:
            return self.solution
        return self._narrowed.folder / CONTROL

    def solution_files(self) -> dict[str, str]:
        return dict(self._solution_files)

    @cached_property
    def _solution_files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.solution)): path.read_text(encoding="utf-8")
            for path in sorted(self.solution.rglob("*.py"))
            if "__pycache__" not in path.parts
        }

    @property
    def alternates(self) -> list[Path]:
        if self._narrowed is not None:
            return []
        return sorted(p for p in (self.folder / "alternates").iterdir() if p.is_dir())

    def module(self, name: str) -> ModuleType:
        """A module of the rule, such as `cases`."""
        return importlib.import_module(f"{self._rule_package}.{name}")

    @cached_property
    def _rule_package(self) -> str:
        """Asked for with every comparison of a diagnosis."""
        inner = self.rule_folder.relative_to(self.folder).parts
        return ".".join((self.package, *inner))

    def profile_module(self, name: str) -> ModuleType:
        """A module of the profile, such as the golden test of a flawed prompt."""
        return importlib.import_module(f"{self.package}.{FOLDER}.{self.profile_name}.{name}")

    @cached_property
    def cases(self) -> list[Case]:
        return [case for case in self._all_cases if case.id not in self.not_asked]

    @cached_property
    def traps(self) -> list[Trap]:
        return [trap for trap in self._all_traps if trap.id not in self.not_asked]

    @cached_property
    def forms(self) -> dict[str, Trap]:
        """Form of a bug → the trap that names it."""
        return {form: trap for trap in self.traps for form in trap.forms}

    @cached_property
    def _all_cases(self) -> list[Case]:
        return collect(self.module("cases"), Case)

    @cached_property
    def _all_traps(self) -> list[Trap]:
        """Of `traps`, or of the modules that it lists as its PARTS, in their order."""
        whole = self.module("traps")
        parts: Sequence[ModuleType] = getattr(whole, "PARTS", (whole,))
        own = [trap for part in parts for trap in collect(part, Trap)]
        if self.private_traps:
            self._refuse_taken_names(own)
        return [*own, *self.private_traps]

    def _refuse_taken_names(self, own: Sequence[Trap]) -> None:
        """A `UsageError` where a private trap has the name of a check of the challenge."""
        taken = {trap.id for trap in own} | {case.id for case in self._all_cases}
        for trap in self.private_traps:
            if trap.id in taken:
                raise UsageError(
                    f"the trap set {self.trap_set} has a trap {trap.id!r}, and {self.id} has a "
                    "check of that name: rename the function"
                )

    @cached_property
    def private_traps(self) -> list[Trap]:
        """Those of the private set."""
        return self.trap_set.traps(self.id) if self.trap_set else []

    @cached_property
    def slow(self) -> frozenset[str]:
        """The checks that take seconds each."""
        found: frozenset[str] = getattr(self.module("cases"), "SLOW", frozenset())
        return found

    @property
    def left_out_of_quick(self) -> frozenset[str]:
        """The slow checks that the quick reward does not ask."""
        asked: frozenset[str] = getattr(self.module("cases"), "QUICK_TOO", frozenset())
        return self.slow - asked

    @cached_property
    def not_asked(self) -> dict[str, str]:
        """Check → the capability that it needs and the profile's prompt does not ask for."""
        if self.profile is None or self.profile.has_rule:
            return {}
        outside = {
            check: name
            for name, checks in self.capabilities.items()
            if not self.scope.has(name)
            for check in checks
        }
        if not self.scope.has(REFUSALS):
            both: list[Case | Trap] = [*self._all_cases, *self._all_traps]
            outside |= {check.id: REFUSALS for check in both if check.dimension == "robustness"}
        return outside

    def outside_checks(self) -> tuple[list[Case], list[Trap]]:
        """The contract's cases and traps that the profile does not ask."""
        return (
            [case for case in self._all_cases if case.id in self.not_asked],
            [trap for trap in self._all_traps if trap.id in self.not_asked],
        )

    @cached_property
    def capabilities(self) -> dict[str, list[str]]:
        """Capability → the checks that need it, from `capabilities.toml`."""
        path = self.folder / "capabilities.toml"
        found: dict[str, list[str]] = (
            tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        )
        return found

    @property
    def dictionary_path(self) -> Path:
        """Where the fault dictionary is written; that of a private set stays in its folder."""
        if self.trap_set is not None and self.private_traps:
            return self.trap_set.dictionary_path(self.id)
        return self._own_dictionary_path

    @property
    def _own_dictionary_path(self) -> Path:
        return (self._narrowed or self).folder / "fault_dictionary.json"

    @cached_property
    def fault_dictionary(self) -> dict[str, frozenset[str]]:
        """Form of a bug → the checks that it fails, by `trapline certify --dictionary`."""
        fails: dict[str, list[str]] = {}
        for path in (self._own_dictionary_path, self.dictionary_path):
            if path.is_file():
                fails |= json.loads(path.read_text(encoding="utf-8"))["fails"]
        return {form: frozenset(checks) for form, checks in fails.items()}

    @property
    def equivalent(self) -> dict[str, str]:
        """Mechanical mutants that no check can tell from the solution, id → reason."""
        return self._mechanical("EQUIVALENT")

    @property
    def survivors(self) -> dict[str, str]:
        """Mechanical mutants known to survive although they are bugs, id → reason."""
        return self._mechanical("SURVIVORS")

    def _mechanical(self, name: str) -> dict[str, str]:
        if not (self.rule_folder / "mechanical.py").is_file():
            return {}
        reasons: dict[str, str] = getattr(self.module("mechanical"), name, {})
        return reasons

    @property
    def judge_modules(self) -> list[Path]:
        """The challenge's own code that never leaves the judge: cases, traps and more."""
        return sorted({*self.folder.glob("*.py"), *self.rule_folder.glob("*.py")})

    @property
    def measures_time(self) -> bool:
        return hasattr(self.module("cases"), "speed")

    def sandbox_config(self, level: Level, call_seconds: float | None = None) -> SandboxConfig:
        """The sandbox of this challenge's submissions; only the time limit may differ."""
        limits = self.plan.limits
        return SandboxConfig(
            level=level,
            limits=SandboxLimits(memory_mb=limits.memory_mb, processes=limits.processes),
            call_seconds=call_seconds or limits.call_seconds,
            packages=tuple(name for name in self.plan.packages if is_installed(name)),
            scope=self.scope,
            device=device_here() if self.track == "gpu" else "",
        )

    def missing_packages(self, imports: Iterable[str]) -> list[str]:
        """Permitted packages that these imports use and this machine lacks."""
        used = {name.split(".")[0] for name in imports}
        return [name for name in self.plan.packages if name in used and not is_installed(name)]

    @cached_property
    def digest(self) -> str:
        """Identifies everything that can change a verdict, `judge_dependencies` included."""
        own = {str(path.relative_to(self.folder)): path for path in self._own_files()}
        private = self.trap_set if self.private_traps else None
        judges = [*self.judge_modules, *(private.folder.glob("*.py") if private else ())]
        files = {**own, **judge_dependencies(judges)}
        total = hashlib.sha256(private.digest.encode() if private else b"")
        for name, path in sorted(files.items()):
            total.update(f"{name}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()

    def _own_files(self) -> Iterator[Path]:
        """The challenge's files, of its profiles and tracks only its own."""
        others = (self.folder / FOLDER, self.folder / GPU_FOLDER)
        for path in _files_in(self.folder):
            if not any(folder in path.parents for folder in others):
                yield path
        if self.profile is not None:
            yield from _files_in(self.profile.folder)


def _profiled(plan: ChallengePlan, profile: Profile) -> ChallengePlan:
    """The plan of a challenge with what the profile states differently."""
    stated = {
        "entry_points": profile.plan.entry_points or plan.entry_points,
        "weights": profile.plan.weights or plan.weights,
        "summary": profile.plan.summary,
    }
    return plan.model_copy(update=stated)


def _files_in(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _read_plan(path: Path) -> ChallengePlan:
    try:
        return ChallengePlan.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UsageError(
            f"{path.parent} is not a challenge folder: challenge.toml is missing"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_sentence(error)}") from None


def _first_sentence(error: ValidationError) -> str:
    # A misspelt key is also a missing one: the misspelling says more.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}"
    return f"{where}: {first['msg']}"


_ORDER = ("medium", "hard", "extra hard", "research")


@cache
def load_all(track: Track = "cpu") -> dict[str, Challenge]:
    """All challenges of a track that ship with the package, easiest first."""
    root = Path(__file__).resolve().parents[1] / "challenges"
    inside = f"/{GPU_FOLDER}" if track == "gpu" else ""
    found = []
    for path in sorted(root.glob(f"*{inside}/challenge.toml")):
        package = ".".join(path.parent.relative_to(root.parents[1]).parts)
        found.append(Challenge(path.parent, package))
    found.sort(key=lambda challenge: _ORDER.index(challenge.plan.difficulty))
    return {challenge.id: challenge for challenge in found}


def refuse_unknown_profile(name: str) -> None:
    """A `UsageError` unless at least one challenge has a profile of this name."""
    known = sorted({one for each in load_all().values() for one in profile_names(each.folder)})
    if name not in known:
        raise UsageError(f"unknown profile {name!r}; the profiles are: {', '.join(known)}")


def load(
    challenge_id: str, track: Track = "cpu", profile: str = "", trap_set: Path | None = None
) -> Challenge:
    """The challenge of this id, or a `UsageError` that names the ones there are."""
    known = load_all(track)
    if challenge_id not in known:
        which = "challenges" if track == "cpu" else "challenges of the gpu track"
        raise UsageError(f"unknown challenge {challenge_id!r}; the {which} are: {', '.join(known)}")
    own = known[challenge_id]
    if not profile and trap_set is None:
        return own
    return _variant(own, profile, trap_set)


@cache
def _variant(own: Challenge, profile: str, trap_set: Path | None) -> Challenge:
    return Challenge(own.folder, own.package, profile, trap_set)
