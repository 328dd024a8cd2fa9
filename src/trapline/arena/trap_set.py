"""Private trap sets: traps that are in no repository, in a folder beside the package.

`traps.toml` gives the set a name and a version, `<challenge>.py` holds traps for one challenge in
the same form as the challenge's own, `_<name>.py` holds what several of them share.
"""

import hashlib
import importlib.util
import sys
import tomllib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import ModuleType

import numpy as np
from pydantic import Field, ValidationError

from trapline.arena.errors import UsageError
from trapline.arena.judge.traps import Check, Trap, collect
from trapline.arena.process.proxy import Submission
from trapline.arena.record import Record, TrapSetName

PLAN = "traps.toml"
#: What each mutant fails, by `trapline certify --dictionary --traps`.
DICTIONARY = "{challenge}.faults.json"


class TrapSetPlan(Record):
    """`traps.toml`, whole."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")
    version: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$")
    #: Situations that each trap draws; the first wrong answer counts.
    variants: int = Field(default=1, ge=1, le=100)
    #: Why the set no longer grades, for example that it was published; empty while it does.
    retired: str = ""


class TrapSet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.plan = _read_plan(self.folder / PLAN)

    def __str__(self) -> str:
        return f"{self.plan.name} {self.plan.version}"

    @property
    def challenges(self) -> list[str]:
        """The ids of the challenges that the set has traps for."""
        return sorted(p.stem for p in self.folder.glob("*.py") if not p.name.startswith("_"))

    def refuse_unknown(self, known: list[str]) -> None:
        """A `UsageError` for a file that names no challenge, or where there is none at all."""
        if not self.challenges:
            raise UsageError(
                f"{self.folder} has no traps: a file <challenge>.py holds those of one challenge"
            )
        for name in self.challenges:
            if name not in known:
                raise UsageError(
                    f"{self.folder / name}.py does not name a challenge; the challenges are: "
                    f"{', '.join(known)} (files with shared code begin with an underscore)"
                )

    def refuse_retired(self) -> None:
        if self.plan.retired:
            raise UsageError(
                f"the trap set {self} is retired ({self.plan.retired}): grade with a newer version"
            )

    def path(self, challenge: str) -> Path | None:
        """The file with the traps for this challenge."""
        path = self.folder / f"{challenge}.py"
        return path if path.is_file() else None

    def dictionary_path(self, challenge: str) -> Path:
        return self.folder / DICTIONARY.format(challenge=challenge)

    def traps(self, challenge: str) -> list[Trap]:
        """The set's traps for this challenge, each over as many situations as the plan says."""
        if self.path(challenge) is None:
            return []
        found = collect(self._module(challenge), Trap)
        if not found:
            raise UsageError(f"{self.path(challenge)} has no function with the decorator @trap")
        for trap in found:
            if trap.severity == "critical" and not trap.seen:
                raise UsageError(
                    f"{self.path(challenge)}: the trap {trap.id} is critical, but `seen` does not "
                    "say where its bug was seen: a constructed bug can be major or minor"
                )
        return [replace(trap, run=_varied(trap.run, self.plan.variants)) for trap in found]

    def name(self, challenge: str) -> TrapSetName | None:
        """What a cell records: the set, and with how many traps it graded."""
        traps = self.traps(challenge)
        if not traps:
            return None
        return TrapSetName(
            name=self.plan.name,
            version=self.plan.version,
            digest=self.digest,
            traps=[trap.id for trap in traps],
        )

    @property
    def files(self) -> list[Path]:
        """Everything that can change a verdict, the plan apart."""
        return sorted([*self.folder.glob("*.py"), *self.folder.glob("*.faults.json")])

    @cached_property
    def digest(self) -> str:
        """Changes with a trap, the version or the number of variants, not when the set retires."""
        total = hashlib.sha256(f"{self} {self.plan.variants}".encode())
        for path in self.files:
            total.update(f"\0{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()

    def _module(self, challenge: str) -> ModuleType:
        """Imported as a part of a package of its own, so that it can import its neighbours."""
        package = f"trapline_traps_{self.digest[:16]}"
        if package not in sys.modules:
            spec = importlib.util.spec_from_loader(package, None, is_package=True)
            assert spec is not None
            sys.modules[package] = importlib.util.module_from_spec(spec)
            sys.modules[package].__path__ = [str(self.folder)]
        path = self.folder / f"{challenge}.py"
        try:
            return importlib.import_module(f"{package}.{challenge}")
        except Exception as error:  # whatever the file does when it is imported
            raise UsageError(
                f"{path} cannot be imported: {type(error).__name__}: {error}"
            ) from None


def _varied(run: Check, variants: int) -> Check:
    """The check on several situations, each from a random stream of its own."""
    if variants == 1:
        return run

    def all_variants(submission: Submission, rng: np.random.Generator) -> None:
        for stream in rng.spawn(variants):
            run(submission, stream)

    return all_variants


def _read_plan(path: Path) -> TrapSetPlan:
    try:
        return TrapSetPlan.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UsageError(
            f"{path.parent} is not a trap set: {PLAN} with a name and a version is missing"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}: {first['msg']}") from None
