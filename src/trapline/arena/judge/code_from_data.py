"""Finds where a submission may run code that its Python files do not show.

Figures about the code describe what was read; `exec` of a string, a pickle or a shared library
runs something else. Runs inside the sandbox, so it needs only the standard library.
"""

import ast
import os
import zipfile
from collections.abc import Iterator

#: Modules whose purpose is to load or make code, and everything below them.
MODULES = {
    *("marshal", "pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve"),
    *("ctypes", "_ctypes", "cffi", "importlib", "imp", "_imp", "runpy", "zipimport", "pkgutil"),
    *("code", "codeop", "cProfile", "profile", "pdb", "bdb", "trace", "site", "pydoc"),
    *("doctest.testfile", "doctest.DocFileSuite", "doctest.run_docstring_examples"),
    *("logging.config", "multiprocessing.reduction", "gc.get_objects", "os.system", "os.popen"),
    *("typing.ForwardRef", "typing.get_type_hints", "sympy.sympify", "sympy.lambdify"),
    *("torch.jit.load", "torch.ops.load_library", "torch.classes.load_library"),
    *("torch.utils.cpp_extension", "pandas.eval", "pandas.read_pickle"),
    *("builtins", "numpy.ctypeslib", "numpy.f2py", "types.FunctionType", "types.CodeType"),
    *("numpy.lib.format.read_array", "numpy.lib.npyio", "sys.meta_path", "sys.path_hooks"),
}
#: Read versions and data files of installed packages, and load no code.
INNOCENT = ("importlib.metadata", "importlib.resources")
BUILTINS = {"exec", "eval", "compile", "__import__", "__builtins__", "__loader__", "__spec__"}
ATTRIBUTES = {
    *("__builtins__", "__loader__", "__subclasses__", "__globals__", "__code__"),
    *("exec_module", "load_module", "ctypeslib"),
    *("f_builtins", "f_globals", "f_code", "gi_code", "cr_code", "ag_code"),
}
#: A file of the submission with this name hides the library's, which no process has loaded before.
SHADOWED = ("code", "imp", "profile", "trace")
#: Run their first argument, which is honest where it is a function.
TIMERS = ("timeit.timeit", "timeit.repeat", "timeit.Timer")
SUFFIXES = (".so", ".pyd", ".dll", ".dylib", ".pyc", ".pyo", ".pkl", ".pickle", ".marshal")


def findings(trees: dict[str, ast.Module], folder: str) -> list[str]:
    """`file:line what` for each place, in the order of files and lines."""
    shadowed = {name for name in SHADOWED if f"{name}.py" in trees}
    found = [
        f"{name}:{line} {what}"
        for name, tree in sorted(trees.items())
        for line, what in sorted(set(_in_module(tree)))
        if what.split(".")[0] not in shadowed
    ]
    return found + sorted(_files(folder))


def _files(folder: str) -> Iterator[str]:
    """Compiled or pickled files. An array of objects is a pickle, whatever its name says."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            shown = os.path.relpath(path, folder)
            if name.endswith(SUFFIXES) or ".so." in name:
                yield f"{shown} {os.path.splitext(name)[1]} file"
            elif os.path.isfile(path) and (what := _hidden_in(path)):
                yield f"{shown} {what}"


def _hidden_in(path: str) -> str:
    """What a file holds that can be executed, whatever its name says."""
    with open(path, "rb") as file:
        start = file.read(256)
    if start.startswith(b"\x7fELF"):
        return "compiled code"
    if zipfile.is_zipfile(path):
        return "" if _only_arrays(path) else "archive"
    is_array = path.endswith(".npy") or start.startswith(b"\x93NUMPY")
    holds_numbers = start.startswith(b"\x93NUMPY") and b"'|O'" not in start
    return "pickle" if is_array and not holds_numbers else ""


def _only_arrays(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return False


def _in_module(tree: ast.Module) -> Iterator[tuple[int, str]]:
    aliases = imported_names(tree)
    own = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for what in _in_node(node, aliases, own):
            yield line, what


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name → what was imported under it."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return aliases


def dotted_name(node: ast.AST, aliases: dict[str, str]) -> str:
    """`np.lib.format` as `numpy.lib.format`; empty where the first part is not imported."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return ""
    return ".".join([aliases[node.id], *reversed(parts)])


def plain_imports(tree: ast.Module) -> set[str]:
    """What `import_module("name")` and `__import__("name")` import, by a literal name."""
    aliases = imported_names(tree)
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {name for call in calls if (name := _plain_import(call, aliases))}


def _plain_import(call: ast.Call, aliases: dict[str, str]) -> str:
    importers = ("importlib.import_module", "__import__")
    target = call.func.id if isinstance(call.func, ast.Name) else ""
    if dotted_name(call.func, aliases) not in importers and target != "__import__":
        return ""
    first = call.args[0] if call.args else None
    is_text = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return str(first.value) if is_text else ""  # type: ignore[union-attr]


def _in_node(node: ast.AST, aliases: dict[str, str], own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _loads_code(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        whole = (f"{node.module}.{alias.name}" for alias in node.names)
        yield from (name for name in whole if _loads_code(name))
    elif isinstance(node, ast.Name) and node.id in BUILTINS - own - set(aliases):
        yield node.id
    elif isinstance(node, ast.Constant) and node.value in ("__builtins__", "__import__"):
        yield str(node.value)
    elif isinstance(node, ast.Attribute):
        if node.attr in ATTRIBUTES:
            yield node.attr
        elif _loads_code(name := dotted_name(node, aliases)):
            yield name
    elif isinstance(node, ast.Subscript) and dotted_name(node.value, aliases) == "sys.modules":
        yield from _in_modules(node.slice)
    elif isinstance(node, ast.Call):
        yield from _in_call(node, aliases)
        yield from _in_timer(node, aliases, own)


def _in_modules(key: ast.expr) -> Iterator[str]:
    """`sys.modules[key]`: any module, unless the key is a name that everybody can read."""
    if isinstance(key, ast.Constant):
        if _loads_code(str(key.value)):
            yield f"sys.modules[{key.value!r}]"
    elif not (isinstance(key, ast.Name) and key.id == "__name__"):
        yield "computed name of sys.modules"


def _in_timer(call: ast.Call, aliases: dict[str, str], own: set[str]) -> Iterator[str]:
    name = dotted_name(call.func, aliases)
    given = [*call.args[:1], *(k.value for k in call.keywords if k.arg in ("stmt", "setup"))]
    known = {*own, *aliases}
    for what in given if name in TIMERS else ():
        honest = isinstance(what, ast.Lambda | ast.Constant | ast.Attribute)
        honest |= isinstance(what, ast.Name) and what.id in known
        if not honest and dotted_name(getattr(what, "func", what), aliases) != "functools.partial":
            yield name


def _in_call(call: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    name = dotted_name(call.func, aliases)
    for keyword in call.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
        if keyword.arg == "allow_pickle" and not is_off:
            yield "allow_pickle"
        elif keyword.arg == "weights_only" and name == "torch.load" and is_off:
            yield "torch.load of whole objects"
        elif keyword.arg is None and name == "numpy.load":
            yield "numpy.load with computed arguments"
    if name == "numpy.load" and len(call.args) > 2:
        yield "allow_pickle"
    if name == "sys.modules.get":
        yield from (what for key in call.args[:1] for what in _in_modules(key))
    if name in ("operator.attrgetter", "operator.methodcaller"):
        yield from (name for key in call.args[:1] if not isinstance(key, ast.Constant))
    if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "vars") and call.args:
        yield from _in_lookup(call, aliases)


def _in_lookup(call: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    """`getattr(module, "name")` is `module.name`; a computed name could be any of them."""
    module = dotted_name(call.args[0], aliases)
    name = call.args[1] if len(call.args) > 1 else None
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        if name.value in ATTRIBUTES or (module and _loads_code(f"{module}.{name.value}")):
            yield f"{module}.{name.value}".lstrip(".")
    elif module:
        yield f"computed name of {module}"


def _loads_code(name: str) -> bool:
    if any(f"{name}.".startswith(f"{innocent}.") for innocent in INNOCENT):
        return False
    return any(f"{name}.".startswith(f"{module}.") for module in MODULES)
