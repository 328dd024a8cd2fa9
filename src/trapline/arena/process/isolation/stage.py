"""The folder one launch is served from: the program, a copy of the submission, a place to write."""

import marshal
import os
import shutil
import stat
import sys
import tempfile
from functools import lru_cache
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

from trapline.arena.errors import ArenaError, UsageError
from trapline.arena.process.isolation import packages

_PREFIX = "trapline-sandbox-"
_ARENA = Path(__file__).resolve().parents[2]
#: The files of each program, the program itself first.
_PROGRAMS = {
    "worker": ("process/worker", "process/wire", "process/numpy_start"),
    "gpu_runner": (
        *("gpu/runner", "process/wire", "process/worker"),
        *("gpu/memory", "gpu/tensors", "gpu/burst", "gpu/trapline.h"),
    ),
    "tester": ("judge/tester", "process/wire", "process/numpy_start"),
    "inspector": (
        *("judge/inspector", "judge/rewrite", "judge/code_from_data"),
        "certify/mechanical",
    ),
}
_MOST_FILES = 4096
_MOST_BYTES = 256 << 20


class SandboxStage:
    """Private to one launch; gone when that ends."""

    def __init__(self, program: str | Path, submission: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.submission = self.root / "submission"
        self.scratch = self.root / "scratch"
        self.scratch.mkdir(mode=0o700)
        try:
            self.program = self._add_program(program)
            self.inside = _compiled_beside(self._add(Path(__file__).with_name("inside.py")))
            _copy_tree(submission, self.submission)
        except BaseException:
            self.remove()
            raise

    def _add_program(self, program: str | Path) -> Path:
        if isinstance(program, Path):
            return self._add(program)
        names = [name if "." in name else f"{name}.py" for name in _PROGRAMS[program]]
        added = [self._add(_ARENA / name) for name in names]
        return added[0]

    def _add(self, source: Path) -> Path:
        """A file of the program, and its code, which every launch would compile again."""
        target = self.root / "program" / source.name
        try:
            text = source.read_bytes()
        except FileNotFoundError:
            raise UsageError(f"no program {source}") from None
        _write_readable(target, text)
        if source.suffix == ".py":
            _write_readable(_compiled_beside(target), _compiled(text, source.name))
        return target

    def site(self, names: tuple[str, ...]) -> Path:
        """A folder for the import path with links to NumPy and these packages, nothing else."""
        folder = self.root / "site"
        _make_readable_folder(folder)
        for name, real in packages.entries(("numpy", *names)).items():
            link = folder / name
            _make_readable_folder(link.parent)
            link.symlink_to(real)
        return folder

    def remove(self) -> None:
        """A submission that ran as ourselves may have locked its folders: unlock, then remove."""
        for folder, names, _ in os.walk(self.root):
            for name in names:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(self.root, ignore_errors=True)


@lru_cache(maxsize=32)
def _compiled(text: bytes, name: str) -> bytes:
    """As the interpreter writes it, marked as one whose source need not be looked at."""
    code = compile(text, name, "exec", dont_inherit=True, optimize=0)
    unchecked = (1).to_bytes(4, "little")
    return MAGIC_NUMBER + unchecked + source_hash(text) + marshal.dumps(code)


def _compiled_beside(source: Path) -> Path:
    """Where the interpreter looks for the code of a file."""
    return source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"


def _write_readable(path: Path, content: bytes) -> None:
    _make_readable_folder(path.parent)
    path.write_bytes(content)
    path.chmod(0o444)


def scratch_folder() -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder; `remove_leftovers` removes it if this process is killed."""
    return tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-")


def remove_leftovers() -> None:
    """Stages and scratch folders of controllers that were killed before they could clean up."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _copy_tree(source: Path, target: Path) -> None:
    """Plain files and folders only: a link or a device in a submission leads nowhere."""
    if not source.is_dir():
        raise UsageError(f"no submission folder {source}")
    files, total = 0, 0
    for folder, _, names in os.walk(source, followlinks=False):
        copy = target / Path(folder).relative_to(source)
        _make_readable_folder(copy)
        for name in names:
            files += 1
            total += _copy_file(Path(folder) / name, copy / name)
            if files > _MOST_FILES or total > _MOST_BYTES:
                raise ArenaError(f"{source} holds more files than a submission may")


def _make_readable_folder(path: Path) -> None:
    """Readable inside, where the user is another, whatever the umask is."""
    path.mkdir(exist_ok=True)
    path.chmod(0o755)


def _copy_file(source: Path, target: Path) -> int:
    if not stat.S_ISREG(source.lstat().st_mode):
        return 0
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        written = target.write_bytes(file.read(_MOST_BYTES + 1))
    target.chmod(0o444)
    return written
