"""Finds where a submission may run code that its Python files do not show.

Figures about the code describe what was read; `exec` of a string, a pickle or a shared library
runs something else. Runs inside the sandbox, so it needs only the standard library.
"""

import ast
import os
import zipfile
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

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
    *(f"os.{how}{what}" for how in ("exec", "spawn") for what in ("l", "le", "lp", "lpe")),
    *(f"os.{how}{what}" for how in ("exec", "spawn") for what in ("v", "ve", "vp", "vpe")),
    *("os.posix_spawn", "os.posix_spawnp", "pty", "_posixsubprocess", "asyncio.subprocess"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "multiprocessing.set_executable"),
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
#: Start a program: honest where the command is written out and runs only what the files show.
STARTERS = {f"subprocess.{name}" for name in ("run", "Popen", "call", "check_call", "check_output")}
#: Programs that only say something.
SPEAKERS = {"true", "false", "echo", "uname", "nproc", "lscpu", "nvidia-smi", "hostname"}
#: What `python -m` may run beside the submission's own modules.
TEST_RUNNERS = {"pytest", "unittest"}
#: Change what a program loads when it starts.
PRELOADS = {"LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONSTARTUP", "PYTHONHOME", "BASH_ENV"}
#: What a path to the submission's own folder is computed with.
PATH_TOOLS = ("os.path", "os.getcwd", "os.curdir", "os.pardir", "pathlib", "sys.path")
SUFFIXES = (".so", ".pyd", ".dll", ".dylib", ".pyc", ".pyo", ".pkl", ".pickle", ".marshal")


def findings(trees: dict[str, ast.Module], folder: str) -> list[str]:
    """`file:line what` for each place, in the order of files and lines."""
    shadowed = {name for name in SHADOWED if f"{name}.py" in trees}
    found = [
        f"{name}:{line} {what}"
        for name, tree in sorted(trees.items())
        for line, what in sorted(set(_in_module(tree, trees)))
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


def _in_module(tree: ast.Module, files: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each place; `files` are the paths of the submission's modules."""
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
    yield from _started(tree, _Module(aliases, _assigned_once(tree), files))


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
        whole = f"{module}.{name.value}".lstrip(".")
        if name.value in ATTRIBUTES or (module and (_loads_code(whole) or whole in STARTERS)):
            yield whole
    elif module:
        yield f"computed name of {module}"


def _loads_code(name: str) -> bool:
    if any(f"{name}.".startswith(f"{innocent}.") for innocent in INNOCENT):
        return False
    return any(f"{name}.".startswith(f"{module}.") for module in MODULES)


# --- programs that are started, and folders to import from ---------------------------------------


class _Module(NamedTuple):
    """What is known of one module: imported names, names with one value, the files beside it."""

    aliases: dict[str, str]
    assigned: dict[str, ast.expr]
    files: Collection[str]

    def value(self, node: ast.AST | None) -> ast.AST | None:
        """What an expression stands for: the value of a name, the argument of `str` or `dedent`."""
        for _ in range(8):
            if isinstance(node, ast.Name) and node.id in self.assigned:
                node = self.assigned[node.id]
            elif isinstance(node, ast.Call) and len(node.args) == 1 and self._keeps(node.func):
                node = node.args[0]
            else:
                break
        return node

    def called(self, node: ast.expr) -> str:
        """The dotted name of what an expression stands for."""
        return dotted_name(self.value(node) or node, self.aliases)

    def _keeps(self, function: ast.expr) -> bool:
        is_str = isinstance(function, ast.Name) and function.id == "str"
        return is_str or dotted_name(function, self.aliases) == "textwrap.dedent"


def _assigned_once(tree: ast.Module) -> dict[str, ast.expr]:
    """Names that one statement gives a value, and no other binds."""
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            values.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.arg):
            values.setdefault(node.arg, []).append(None)
    stores = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and _binds(n))
    return {
        name: found[0]
        for name, found in values.items()
        if len(found) == 1 and found[0] is not None and stores[name] == 1
    }


def _binds(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def _started(tree: ast.Module, module: _Module) -> Iterator[tuple[int, str]]:
    # Calls of an assigned name are followed to its value; a type is only named.
    judged = {id(part) for note in _annotations(tree) for part in ast.walk(note)}
    judged |= {id(value) for value in module.assigned.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            judged.add(id(node.func))
            if (name := module.called(node.func)) in STARTERS and (what := _unread(node, module)):
                yield node.lineno, f"{name} of {what}"
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in judged:
            if isinstance(node.ctx, ast.Load) and (name := module.called(node)) in STARTERS:
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and node.value in PRELOADS:
            yield node.lineno, str(node.value)
        for path in _import_paths(node, module):
            if not _is_own_folder(path, module):
                yield path.lineno, "import from another folder"


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        note = getattr(node, "annotation", None) or getattr(node, "returns", None)
        if note is not None:
            yield note


def _unread(call: ast.Call, module: _Module) -> str:
    """What a started program runs that cannot be read; empty where all of it can."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    command = module.value(call.args[0] if call.args else keywords.get("args"))
    if {"executable", "preexec_fn", None} & set(keywords):
        return "a computed command"
    if "cwd" in keywords and not _is_own_folder(keywords["cwd"], module):
        return "a command in another folder"
    if isinstance(command, ast.Constant) and isinstance(command.value, str):
        words: list[ast.AST | None] = [ast.Constant(word) for word in command.value.split()]
        if set(command.value) & set("|;&<>$`()\n") or not words:
            return "a line for a shell"
    elif isinstance(command, ast.List | ast.Tuple) and command.elts:
        words = [module.value(word) for word in command.elts]
    else:
        return "a computed command"
    if dotted_name(words[0] or command, module.aliases) == "sys.executable":
        return _unread_python(words[1:], module)
    program = os.path.basename(_text(words[0]) or "")
    if program in ("python", "python3"):
        return _unread_python(words[1:], module)
    return "" if program in SPEAKERS else program or "a computed program"


def _unread_python(words: list[ast.AST | None], module: _Module) -> str:
    """The same for the arguments of an interpreter."""
    while words:
        word, following = _text(words[0]), words[1] if len(words) > 1 else None
        if word == "-c":
            return _unread_text(_text(following), module)
        if word == "-m":
            name = _text(following) or "a computed module"
            own = {path.removesuffix(".py").replace(os.sep, ".") for path in module.files}
            return "" if name in own | TEST_RUNNERS else f"python -m {name}"
        if word is None or not word.startswith("-") or word in ("-", "-i"):
            return _unread_file(words[0], module)
        words = words[2 if word in ("-W", "-X") else 1 :]
    return "standard input"


def _unread_text(text: str | None, module: _Module) -> str:
    if text is None:
        return "computed code"
    try:
        found = sorted(_in_module(ast.parse(text), module.files))
    except (SyntaxError, ValueError):
        return ""  # it runs nothing
    return f"python -c with {found[0][1]}" if found else ""


def _unread_file(node: ast.AST | None, module: _Module) -> str:
    """A script must be one of the files: this one, or one that a text in the expression names."""
    parts = list(ast.walk(node)) if node is not None else []
    names = [text for part in parts if (text := _text(part))]
    is_itself = any(isinstance(part, ast.Name) and part.id == "__file__" for part in parts)
    name = os.path.basename(names[-1]) if names else ""
    if name in {os.path.basename(path) for path in module.files} or (is_itself and not names):
        return ""
    return "standard input" if name in ("-", "-i") else name or "a computed file"


def _text(node: ast.AST | None) -> str | None:
    """The text of a literal; what `{value!r}` puts into one is a literal too."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.FormattedValue) and part.conversion != ord("r"):
            return None
        parts.append("0" if isinstance(part, ast.FormattedValue) else _text(part) or "")
    return "".join(parts)


def _import_paths(node: ast.AST, module: _Module) -> Iterator[ast.expr]:
    """What is added to `sys.path`, or given to a program as PYTHONPATH."""
    if isinstance(node, ast.Call):
        name = dotted_name(node.func, module.aliases)
        if name in (
            "sys.path.insert",
            "sys.path.append",
            "sys.path.extend",
            "sys.path.__setitem__",
        ):
            yield from node.args[-1:]
        if len(node.args) > 1 and _text(node.args[0]) == "PYTHONPATH":
            yield node.args[1]
        yield from (k.value for k in node.keywords if k.arg == "PYTHONPATH")
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(_is_import_path(target, module) for target in targets):
            yield node.value
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if _text(key) == "PYTHONPATH":
                yield value


def _is_import_path(target: ast.expr, module: _Module) -> bool:
    whole = target.value if isinstance(target, ast.Subscript) else target
    is_variable = isinstance(target, ast.Subscript) and _text(target.slice) == "PYTHONPATH"
    return is_variable or dotted_name(whole, module.aliases) == "sys.path"


def _is_own_folder(path: ast.expr, module: _Module, depth: int = 4) -> bool:
    """Whether an expression is computed from the submission's own place and folders alone."""
    folders = {part for name in module.files for part in name.split(os.sep)[:-1]}
    for node in ast.walk(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not set(node.value.strip("/").split("/")) <= folders | {"", ".", ".."}:
                return False
            if node.value.startswith("/"):
                return False
        elif isinstance(node, ast.Attribute | ast.Name) and not _is_path_tool(node, module, depth):
            return False
    return True


def _is_path_tool(node: ast.Attribute | ast.Name, module: _Module, depth: int) -> bool:
    name = dotted_name(node, module.aliases)
    if name:
        return any(f"{t}.".startswith(f"{name}.") or name.startswith(f"{t}.") for t in PATH_TOOLS)
    if isinstance(node, ast.Attribute):  # of an expression whose parts are looked at
        return True
    value = module.assigned.get(node.id)
    known = value is not None and depth > 0 and _is_own_folder(value, module, depth - 1)
    return known or node.id in ("__file__", "str", "list", "map")
