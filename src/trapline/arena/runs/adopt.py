"""Adopts a tree of answers to other prompts as a field, by reading alone: nothing is executed.

A tree is `<entrant>/<task>/…`. The task is recognised by the folder's name or by the prompt in it,
the functions that the prompt asks for by their names and parameters.
"""

import ast
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trapline.arena import output_paths
from trapline.arena.challenge import Challenge, load, load_all
from trapline.arena.errors import UsageError
from trapline.arena.judge.intake import SESSION, take_in
from trapline.arena.profile import ADAPTER, CUDA_ADAPTER, EntrySigns, TaskSigns, profile_names
from trapline.arena.record import Record, Track
from trapline.arena.runs import cuda_code
from trapline.arena.runs.answer_code import Definition, Reading, binding, read_code
from trapline.arena.runs.field import RECORD, SETTINGS, printable_name

_PROMPT = re.compile(r"(?i)(prompt|task|readme_task|assignment)\.(md|txt)")
_SESSION = re.compile(r"(?i)ses+ion.*\.jsonl")
#: Beside code, these make an answer of another language.
_OTHER_CODE = (".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".rs", ".metal")


class Adopted(Record):
    """One task folder: what it was taken for, and what became of it."""

    entrant: str
    #: The folder in the tree, as entrant/task.
    source: str
    #: Empty where the task was not recognised.
    challenge: str = ""
    adopted: bool = False
    #: How its functions are called, or why it was not adopted.
    sentence: str
    #: What else a reader should know, such as files that do not parse.
    notes: list[str] = []


@dataclass(frozen=True)
class AdoptOptions:
    profile: str
    #: Adapters of ours: `<entrant>/<challenge>.py`, or `<challenge>.py` for all entrants; `.cu` on
    #: the GPU track.
    adapters: Path | None = None
    track: Track = "cpu"
    #: Mends CUDA files that cannot compile; the entrant is then called `<entrant>-repaired`.
    repair: bool = False


def adopt(tree: Path, out: Path, options: AdoptOptions) -> list[Adopted]:
    """Writes the field and says of every task folder what became of it."""
    _refuse(tree, out, options)
    judges = [
        load(challenge.id, options.track, options.profile)
        for challenge in load_all(options.track).values()
        if options.profile in profile_names(challenge.folder)
    ]
    folders = [
        task
        for entrant in _subfolders(tree)
        for task in _subfolders(entrant)
        if any(path.is_file() for path in task.rglob("*"))
    ]
    found = [_adopt_one(task, out, judges, options) for task in folders]
    if not any(one.adopted for one in found):
        raise UsageError(_nothing(tree, found))
    track = 'track = "gpu"\n' if options.track == "gpu" else ""
    (out / SETTINGS).write_text(
        f'profile = "{options.profile}"\n{track}gold = true\n', encoding="utf-8"
    )
    return found


def _refuse(tree: Path, out: Path, options: AdoptOptions) -> None:
    if not tree.is_dir():
        raise UsageError(f"{tree} is not a folder; a tree of answers is <entrant>/<task>/…")
    if options.adapters is not None and not options.adapters.is_dir():
        raise UsageError(
            f"{options.adapters} is not a folder; adapters are <entrant>/<challenge>.py"
        )
    if output_paths.folder(out, "a field").is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty; choose a new folder for the field")
    if out.resolve().is_relative_to(tree.resolve()):
        raise UsageError(f"{out} lies inside the tree; choose a folder outside {tree}")


def _nothing(tree: Path, found: Sequence[Adopted]) -> str:
    if not found:
        return f"{tree} holds no answers: there is no folder <entrant>/<task>/ with a file in it"
    first = f"{found[0].source}: {found[0].sentence}"
    return f"none of the {len(found)} task folders in {tree} could be adopted; {first}"


def _subfolders(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_dir() and not path.is_symlink() and not path.name.startswith((".", "__"))
    )


def _adopt_one(
    task: Path, out: Path, judges: Sequence[Challenge], options: AdoptOptions
) -> Adopted:
    entrant = task.parent.name
    source = f"{printable_name(entrant)}/{printable_name(task.name)}"

    def said(sentence: str, challenge: str = "", notes: Sequence[str] = ()) -> Adopted:
        return Adopted(
            entrant=printable_name(entrant),
            source=source,
            challenge=challenge,
            sentence=sentence,
            notes=list(notes),
        )

    judge, why = _recognised(task, judges)
    if judge is None:
        return said(why)
    mended = mend(task) if options.repair else {}
    name = f"{entrant}-repaired" if mended else entrant
    target = out / name / judge.id
    if target.exists():
        return said(f"not adopted: {entrant} has another answer to {judge.id}", judge.id)
    reading = read_code(task)
    other_code = any(path.suffix in _OTHER_CODE for path in task.rglob("*"))
    if not reading.code_files and not other_code:
        return said("not adopted: the folder holds no code", judge.id, reading.notes)
    if refused := _refused_bytes(task):
        return said(f"not adopted: {refused}", judge.id, reading.notes)
    if judge.not_run:
        adapter, how = "", f"not run: {judge.not_run}"
    else:
        find = _cuda_adapter if options.track == "gpu" else _adapter
        adapter, how = find(task, entrant, judge, reading, options)
    if not adapter and not judge.not_run:
        return said(f"not adopted: {how}", judge.id, reading.notes)
    _write(task, target, {_adapter_name(options.track): adapter} if adapter else {})
    for file, (text, _) in mended.items():
        (target / file).write_text(text, encoding="utf-8")
    notes = [*reading.notes, *(f"repaired {file}: {done}" for file, (_, done) in mended.items())]
    return said(how, judge.id, notes).model_copy(update={"adopted": True})


def _refused_bytes(task: Path) -> str:
    """Why the answer could not be taken in by the grader; empty when it can."""
    intake = take_in(task)
    return "" if intake.files else intake.refused


# --- which task -----------------------------------------------------------------------------------


def _recognised(task: Path, judges: Sequence[Challenge]) -> tuple[Challenge | None, str]:
    """The challenge that this folder answers, by its name, or else by the prompt in it."""
    name = re.sub(r"[^a-z0-9]+", "_", task.name.lower()).strip("_")
    named = [judge for judge in judges if name in (judge.id, *_signs(judge).folders)]
    if len(named) == 1:
        return named[0], ""
    prompts = [path for path in sorted(task.iterdir()) if _PROMPT.fullmatch(path.name)]
    text = "\n".join(
        path.read_text(errors="replace", encoding="utf-8") for path in prompts if path.is_file()
    )
    stated = [judge for judge in named or judges if text and _is_stated(judge, text)]
    if len(stated) == 1:
        return stated[0], ""
    if named or stated:
        several = ", ".join(judge.id for judge in stated or named)
        return None, f"not adopted: the task may be any of {several}; rename its folder"
    known = ", ".join(judge.id for judge in judges)
    return None, (
        "not adopted: neither the folder's name nor a prompt in it tells the task; name the folder "
        f"as one of {known}"
    )


def _signs(judge: Challenge) -> TaskSigns:
    assert judge.profile is not None
    return judge.profile.plan.recognise


def _is_stated(judge: Challenge, text: str) -> bool:
    signs = _signs(judge).prompt
    return bool(signs) and all(re.search(sign, text) for sign in signs)


# --- which functions ------------------------------------------------------------------------------


def _adapter(
    task: Path, entrant: str, judge: Challenge, reading: Reading, options: AdoptOptions
) -> tuple[str, str]:
    """The text of the adapter and where it comes from; or "" and why there is none."""
    given = _given(task, entrant, judge.id, options)
    if given is not None:
        text = given.read_text(errors="replace", encoding="utf-8")
        if wrong := _wrong_adapter(text):
            return "", f"its adapter {given} {wrong}"
        return text, f"through the adapter {given.parent.name}/{given.name}"
    assert judge.profile is not None
    if not judge.profile.template.is_file():
        return "", (
            f"answers to {judge.id} need an adapter; write --adapters DIR/{entrant}/{judge.id}.py"
        )
    found: dict[str, Definition] = {}
    for entry, signs in _signs(judge).entries.items():
        candidates = [one for one in reading.definitions if _fits(one, signs)]
        if len(candidates) != 1:
            return "", _unclear(entry, candidates, reading, f"DIR/{entrant}/{judge.id}.py")
        found[entry] = candidates[0]
    text = binding(judge.profile.template.read_text(encoding="utf-8"), found)
    names = ", ".join(f"{one.file}: {one.name}" for one in found.values())
    return text, f"by {names}"


def _cuda_adapter(
    task: Path, entrant: str, judge: Challenge, reading: Reading, options: AdoptOptions
) -> tuple[str, str]:
    """As `_adapter`, for a launcher in CUDA C++."""
    del reading
    given = _given(task, entrant, judge.id, options)
    if given is not None:
        return given.read_text(
            errors="replace", encoding="utf-8"
        ), f"through the adapter {given.name}"
    assert judge.profile is not None
    path = f"DIR/{entrant}/{judge.id}.cu"
    (signs,) = _signs(judge).entries.values()
    name = signs.names[0]
    found = cuda_code.find_launchers(task, name)
    if len(found) != 1:
        several = " and ".join(one.file for one in found)
        what = f"{several} define {name}" if found else f"no CUDA file defines {name}"
        return "", f"{what}; write --adapters {path}"
    try:
        text = cuda_code.adapter(judge.profile.template.read_text(encoding="utf-8"), found[0])
    except ValueError as unclear:
        return "", f"{unclear}; write --adapters {path}"
    return text, f"by {found[0].file}: {name}{'<k>' if found[0].is_template else ''}"


def mend(task: Path) -> dict[str, tuple[str, str]]:
    """CUDA files that needed a repair → their text after it, and what was done."""
    found = {}
    for path in cuda_code.code_files(task):
        text, done = cuda_code.repaired(path.read_text(errors="replace", encoding="utf-8"))
        if done:
            found[str(path.relative_to(task))] = text, ", ".join(done)
    return found


def _adapter_name(track: Track) -> str:
    return CUDA_ADAPTER if track == "gpu" else ADAPTER


def _given(task: Path, entrant: str, challenge: str, options: AdoptOptions) -> Path | None:
    """An adapter of ours, or the one beside the answer."""
    places = [task / _adapter_name(options.track)]
    if options.adapters is not None:
        suffix = places[0].suffix
        ours = [
            options.adapters / entrant / f"{challenge}{suffix}",
            options.adapters / f"{challenge}{suffix}",
        ]
        places = [*ours, *places]
    return next((path for path in places if path.is_file() and not path.is_symlink()), None)


def _wrong_adapter(text: str) -> str:
    """What is wrong with an adapter, read alone; empty when nothing is."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return f"does not parse: {error}"
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(name.split(".")[0] == "trapline" for name in names):
            return "imports the judge; an adapter imports the answer's own modules only"
    return ""


def _fits(one: Definition, signs: EntrySigns) -> bool:
    named = any(re.fullmatch(sign, one.name, re.IGNORECASE) for sign in signs.names)
    known = {parameter.lower() for parameter in one.parameters} & set(signs.parameters)
    return named and len(known) >= signs.least


def _unclear(entry: str, candidates: Sequence[Definition], reading: Reading, path: str) -> str:
    if candidates:
        several = " and ".join(f"{one.file}: {one.name}" for one in candidates)
        return (
            f"{len(candidates)} candidates for {entry}: {several}; choose one in --adapters {path}"
        )
    if reading.unparsed and not reading.definitions:
        return f"no file can be parsed ({reading.unparsed[0]})"
    return f"no function looks like {entry}; write --adapters {path}"


# --- writing --------------------------------------------------------------------------------------


def _write(task: Path, target: Path, adapter: dict[str, str]) -> None:
    """Copies the answer's bytes, and lays its adapter and the log of its session beside them."""
    for name, content in take_in(task).files.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name, text in adapter.items():
        (target / name).write_text(text, encoding="utf-8")
    logs = sorted(path for path in task.iterdir() if _SESSION.fullmatch(path.name))
    if logs and not logs[0].is_symlink():
        kept = (target / RECORD).with_name(SESSION)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(logs[0], kept)
