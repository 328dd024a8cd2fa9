"""The import rules of the two halves, read from the syntax tree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "trapline"
#: Where torch and triton may be imported at all: in these folders of a family, in modules of these
#: names or prefixes (but never in `api.py` or `oracle.py`), and in the places listed.
HEAVY_FOLDERS = {"triton", "hopper", "cpu"}
HEAVY_MODULES = {
    "bound_launch",
    "c_pointer",
    "call_plans",
    "completion_counters",
    "device",
    "gluon_compat",
    "launch_tape",
    "no_double_backward",
    "reference",
    "registry",
    "operators",
    "fallback",
    "autograd",
    "huggingface",
    "vllm",
}
HEAVY_PREFIXES = ("fast", "kernels", "hopper")
HEAVY_PLACES = (
    "attention/dense/",
    "attention/dropin",
    "beam_search/batched_search",
    "decoder/",
    "kv_cache/torch_backend",
    "ternary/export",
    "ternary/gguf_decoder",
    "ternary/layers",
    "ternary/packed_",
    "ternary/training/",
    "tree_decoding/bulk_answers",
    "tree_decoding/checkpoint",
    "tree_decoding/decoder_target",
    "tree_decoding/drafter",
    "tree_decoding/generate",
    "tree_decoding/prompt_lookup",
    "tree_decoding/speculation",
    "tree_decoding/statistics",
    "tree_decoding/training",
    "tree_decoding/tree_pass",
)
#: Programs that run inside a sandbox: the standard library, NumPy, and the frames between.
INSIDE = {
    "arena/process/worker.py": {"numpy", "numpy_start", "wire"},
    "arena/process/numpy_start.py": {"numpy"},
    "arena/process/wire.py": {"numpy"},
    "arena/judge/tester.py": {"numpy", "numpy_start", "pytest", "wire"},
    "arena/judge/inspector.py": {"code_from_data", "mechanical", "rewrite"},
    "arena/judge/code_from_data.py": set(),
    "arena/judge/rewrite.py": set(),
    "arena/certify/mechanical.py": set(),
}


def imports(tree):
    """Absolute names of everything a module imports, wherever the statement stands."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        # Expressions hold no statements, and are most of a tree.
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, field, ())
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level
            yield from (
                (f"{dots}{node.module or ''}.{alias.name}", node.lineno) for alias in node.names
            )


def is_in(name, package):
    return name == package or name.startswith(f"{package}.")


def why_not(path, name):
    """Why the module at this path (relative to the package) may not import this name, or None."""
    half = path.parts[0]
    heavy = is_in(name, "torch") or is_in(name, "triton")
    rules = {"gold": gold_rule, "arena": arena_rule, "challenges": challenge_rule}
    if name.startswith("."):
        return "relative imports hide what is imported"
    if half not in ("cli", "__main__.py") and is_in(name, "trapline.cli"):
        return "only cli imports cli"
    if half in rules and (reason := rules[half](path, name)):
        return reason
    if heavy and half != "gold" and not is_of_the_gpu_track(path):
        return "torch belongs to the gold's fast paths"
    return None


def gold_rule(path, name):
    if any(is_in(name, f"trapline.{half}") for half in ("arena", "challenges")):
        return "gold imports nothing but gold"
    heavy = is_in(name, "torch") or is_in(name, "triton")
    if heavy and not may_import_torch(path.relative_to("gold")):
        return "torch and triton only in the fast paths"
    return None


def may_import_torch(path):
    """Whether this module, given by its path below gold, belongs to a fast path."""
    if path.as_posix().startswith(HEAVY_PLACES):
        return True
    if path.stem in ("api", "oracle"):
        return False
    return (
        bool(HEAVY_FOLDERS & set(path.parts[:-1]))
        or path.stem in HEAVY_MODULES
        or path.stem.startswith(HEAVY_PREFIXES)
    )


def arena_rule(path, name):
    if is_in(name, "trapline.gold") or is_in(name, "trapline.challenges"):
        return "the arena knows neither gold nor a challenge"
    if path.as_posix() in INSIDE:
        root = name.split(".")[0]
        if root not in INSIDE[path.as_posix()] and root not in sys.stdlib_module_names:
            return "what runs inside the sandbox has the standard library and NumPy"
    return None


def is_of_the_gpu_track(path):
    """Its rig holds tensors; its solutions, alternates, starters and baselines are torch code."""
    if path.parts[0] == "challenges":
        return len(path.parts) > 4 and path.parts[2] == "gpu"
    return path.parts[:2] == ("arena", "gpu")


#: Beside a challenge's own modules, but not of the judge.
SUBMITTED = ("__init__.py", "adapter.py")


def challenge_rule(path, name):
    if not is_in(name, "trapline"):
        return None
    # cases, traps, and the modules of their own that two of them share
    folder = path.parts[2:-1]
    of_a_profile = folder[-2:-1] == ("profiles",) and folder[:-2] in ((), ("gpu",))
    if (folder in ((), ("gpu",)) or of_a_profile) and path.name not in SUBMITTED:
        return None
    return "what is deployed or graded knows nothing of trapline"


def violations(root):
    """Every forbidden import below a package folder, as sentences."""
    found = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        for name, line in imports(ast.parse(file.read_text())):
            if reason := why_not(path, name):
                found.append(f"{path}:{line} imports {name}: {reason}")
    return found


@pytest.fixture
def rules():
    """The checker: folder of a package → sentences."""
    return violations


@pytest.fixture
def loaded():
    """Statements → the modules that a fresh process holds after them."""

    def run(statements):
        code = f"{statements}\nimport sys\nprint(*sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    return run
