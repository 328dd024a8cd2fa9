"""Kernel repositories in the layout that Hugging Face's `kernels` loads, one for each family.

A repository stands alone: it holds the modules of `trapline.gold` that its functions need, with
relative imports and operators in a namespace of its own, and needs torch and Triton. Nothing of
`trapline.gold` is imported here; the sources are read as files.
"""

import ast
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import trapline
from trapline.arena.errors import UsageError
from trapline.arena.export.own_package import own_version

_PACKAGE = "trapline.gold"
_GOLD = Path(trapline.__file__).parent / "gold"
_TEMPLATES = Path(__file__).with_name("templates")
#: Where a build is looked up: the sources are the same, a CPU takes the paths in torch.
VARIANTS = {"torch-cuda": "cuda", "torch-cpu": "cpu"}
#: Number of the API on the hub; a change that breaks callers raises it.
API_VERSION = 1


@dataclass(frozen=True)
class Family:
    """A repository: its public functions by module of `trapline.gold`, and what its card says."""

    title: str
    functions: dict[str, tuple[str, ...]]
    example: str
    #: Rows of the card's table: what, figure on one H200, beside.
    figures: tuple[tuple[str, str, str], ...]


FAMILIES = {
    "norms": Family(
        "Layer norm and RMS norm, forward and backward",
        {"norms.api": ("layer_norm", "layer_norm_backward", "rms_norm")},
        "kernel.rms_norm(x, weight, residual=residual)",
        (("layer norm backward, 8192×8192, bf16", "3.9 TB/s, 93 % of a copy", "2.4× torch"),),
    ),
    "softmax_topk": Family(
        "Softmax and top-k in one pass over the logits",
        {"softmax_topk.api": ("softmax_topk",)},
        "kernel.softmax_topk(logits, k=50)",
        (("softmax + top-64 of 512×128,256 float32", "74 µs, 89 % of reading them", "15× torch"),),
    ),
    "attention": Family(
        "Flash attention, forward and backward, dense and of packed sequences",
        {
            "attention.api": (
                "flash_attention",
                "flash_attention_backward",
                "flash_attention_lse",
                "flash_attention_varlen",
            )
        },
        "kernel.flash_attention(q, k, v, causal=True)",
        (
            ("forward, D 128, 16,384 tokens, causal, bf16", "671 TFLOP/s", "1.15× cuDNN"),
            (
                "backward, the same",
                "613 TFLOP/s (deterministic: 559)",
                "1.12× cuDNN (deterministic: 1.02×)",
            ),
        ),
    ),
    "paged": Family(
        "Attention over a paged KV cache, and appending to it",
        {"attention.paged.api": ("paged_attention", "paged_append")},
        "kernel.paged_attention(q, k_pages, v_pages, block_table, seq_lens)",
        (
            (
                "decode, B8 H32 G8 D128 L1024, bf16",
                "11.70 µs",
                "1.45× FlashAttention-2 on a contiguous cache",
            ),
        ),
    ),
}

_BUILD = """\
[general]
name = "{name}"
version = {api}
license = "Apache-2.0"
backends = ["cpu", "cuda"]
edition = 5

[torch-noarch]
"""
_INIT = '''\
"""{title}: kernels of Trapline {version}."""

from . import layers
{imports}

__all__ = [{names}]
'''
_CARD = """\
---
library_name: kernels
license: apache-2.0
tags: [kernels, triton]
---
# {name}

{title}. From Trapline {version}: each kernel is tested against a float64 oracle.

```python
from kernels import get_kernel

kernel = get_kernel("OWNER/{name}")  # or get_local_kernel(Path("{name}"))
{example}
```

Functions: {functions}. Layers: see `layers.py`. Needs Python 3.11, torch 2.11 to 2.15 and, on a
GPU, Triton 3.6 to 3.9. CPU tensors are computed by torch; NumPy arrays, where NumPy is installed,
by the oracle in float64.

| what | one H200 | beside |
|---|---|---|
{figures}

Figures are from Trapline's `docs/benchmarks.md`, which lists every case, losses included.
"""


def write_kernels(out: Path) -> list[Path]:
    """One repository a family; none is written where one exists already."""
    folders = {out / repository_name(family): family for family in FAMILIES}
    for folder in folders:
        if folder.exists():
            raise UsageError(f"{folder} exists already and is left alone")
    return [_write_repository(folder, family) for folder, family in folders.items()]


def repository_name(family: str) -> str:
    return f"trapline-{family.replace('_', '-')}"


def _write_repository(folder: Path, name: str) -> Path:
    family = FAMILIES[name]
    package = folder.name.replace("-", "_")
    facts = {
        "name": folder.name,
        "title": family.title,
        "version": own_version(),
        "api": API_VERSION,
        "example": family.example,
    }
    functions = [one for names in family.functions.values() for one in names]
    source = folder / "torch-ext" / package
    _write_sources(source, package, family)
    imports = "\n".join(
        f"from .{module} import {', '.join(names)}" for module, names in family.functions.items()
    )
    exported = ", ".join(f'"{one}"' for one in sorted([*functions, "layers"]))
    (source / "__init__.py").write_text(
        _INIT.format(**facts, imports=imports, names=exported), encoding="utf-8"
    )
    shutil.copy(_TEMPLATES / f"layers_{name}.py.in", source / "layers.py")
    (folder / "build.toml").write_text(_BUILD.format(**facts), encoding="utf-8")
    rows = [f"| {' | '.join(row)} |" for row in family.figures]
    listed = ", ".join(f"`{one}`" for one in functions)
    card = _CARD.format(**facts, functions=listed, figures="\n".join(rows))
    (folder / "CARD.md").write_text(card, encoding="utf-8")
    for variant, backend in VARIANTS.items():
        shutil.copytree(source, folder / "build" / variant)
        (folder / "build" / variant / "metadata.json").write_text(
            _metadata(folder.name, source, backend),
            encoding="utf-8",
        )
    return folder


def _metadata(name: str, source: Path, backend: str) -> str:
    """What `kernels` reads; the id names this very version of the sources."""
    total = sha256()
    for path in sorted(source.rglob("*.py")):
        total.update(path.read_bytes())
    metadata = {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{backend}_{total.hexdigest()[:12]}",
        "version": API_VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    return json.dumps(metadata, indent=2) + "\n"


def _write_sources(target: Path, package: str, family: Family) -> None:
    """The modules that the functions need, and files beside them that are not Python."""
    target.mkdir(parents=True)
    shutil.copy(_TEMPLATES / "optional_numpy.py", target / "optional_numpy.py")
    for path in sorted(_closure(family)):
        place = path.relative_to(_GOLD)
        copied = target / place
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(
            _rewrite(path.read_text(encoding="utf-8"), len(place.parts), package), encoding="utf-8"
        )
        for above in copied.relative_to(target).parents:
            (target / above / "__init__.py").touch()
        for other in path.parent.glob("*.c"):
            shutil.copy(other, copied.parent)


def _closure(family: Family) -> set[Path]:
    """Every module that these need, through imports inside functions too."""
    pending = [f"{_PACKAGE}.{module}" for module in family.functions]
    found: set[Path] = set()
    while pending:
        path = _file_of(pending.pop())
        if path is not None and path not in found:
            found.add(path)
            pending += _imports(ast.parse(path.read_text(encoding="utf-8")))
    return found


def _file_of(module: str) -> Path | None:
    """None for the root itself, which only lists names, and for what is not a module."""
    path = _GOLD.joinpath(*module.split(".")[2:])
    if path != _GOLD and path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    inside = path / "__init__.py"
    return inside if path != _GOLD and inside.is_file() else None


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if _file_of(inner) else str(node.module)


def _rewrite(text: str, depth: int, package: str) -> str:
    """Relative imports, NumPy only where it is installed, operators in the package's namespace."""
    lines = text.splitlines(keepends=True)
    dots = "." * depth
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            place = node.lineno - 1
            old = f"from {node.module} import"
            inner = str(node.module)[len(_PACKAGE) :].lstrip(".")
            lines[place] = lines[place].replace(old, f"from {dots}{inner} import", 1)
        elif isinstance(node, ast.ImportFrom) and node.module == "numpy.typing":
            place = node.lineno - 1
            lines[place] = lines[place].replace("numpy.typing", f"{dots}optional_numpy", 1)
        elif isinstance(node, ast.Import) and node.names[0].name == "numpy":
            lines[node.lineno - 1] = f"from {dots}optional_numpy import np\n"
        elif _is_operator(node):
            name = node.args[0]  # type: ignore[attr-defined]
            place = name.lineno - 1
            lines[place] = lines[place].replace(f'"{name.value}"', f'"{package}_{name.value}"', 1)
    return "".join(lines)


def _is_operator(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "operator"
        and isinstance(node.args[0], ast.Constant)
    )
