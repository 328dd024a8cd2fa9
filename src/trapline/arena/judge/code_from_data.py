"""Finds where a submission may run code that its Python files do not show.

Figures about the code describe what was read; `exec` of a string, a pickle or a shared library
runs something else. Runs inside the sandbox, so it needs only the standard library.
"""

import ast
import io
import os
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import IO, Any, NamedTuple

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
    *("multiprocessing.connection", "multiprocessing.managers", "numpy.lib._npyio_impl"),
    *("numpy.lib._format_impl", "types.LambdaType", "typing.evaluate_forward_ref", "annotationlib"),
    *("timeit.main", "unittest.TestLoader", "unittest.defaultTestLoader", "unittest.loader"),
    *("sympy.parsing", "sympy.core.sympify", "codecs.register", "sys.setprofile"),
    *(f"sys.modules.{how}" for how in ("values", "items", "copy", "pop", "popitem", "__getitem__")),
}
#: Modules that other modules hold: `numpy.lib.format.pickle` is `pickle`.
HELD = {"sys", "os", "pickle", "marshal", "ctypes", "importlib", "builtins", "subprocess", "runpy"}
#: Read versions and data files of installed packages, and load no code.
INNOCENT = ("importlib.metadata", "importlib.resources")
BUILTINS = {
    *("exec", "eval", "compile", "__import__", "__builtins__", "__loader__", "__spec__"),
    *("__path__", "breakpoint"),
}
ATTRIBUTES = {
    *("__builtins__", "__loader__", "__subclasses__", "__globals__", "__code__"),
    *("__self__", "__path__", "send_bytes"),
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
#: Change the folder that a relative path means.
MOVERS = ("os.chdir", "os.fchdir", "contextlib.chdir")
#: Have a switch that runs data, which computed arguments could set.
SWITCHED = ("numpy.load", "inspect.signature", "inspect.get_annotations")
#: Texts that an honest answer has no reason to hold: what they name runs code from data.
TEXTS = {
    *(name for name in {*BUILTINS, *ATTRIBUTES} if name[:2] in ("__", "f_")),
    *("allow_pickle", "__annotations__"),
}
GETTERS = ("get", "pop", "setdefault", "__getitem__")
SETTERS = ("update", "setdefault", "__setitem__", "__ior__")
#: Functions that keep none of their arguments.
READERS = {
    "print",
    "list",
    "len",
    "str",
    "repr",
    "tuple",
    "sorted",
    "set",
    "iter",
    "enumerate",
    "any",
}
#: What texts are put together with.
TEXT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "chr": chr,
    "str": str,
    "bytes": bytes,
    "list": list,
    "reversed": lambda text: text[::-1],
}
TEXT_METHODS = {
    *("join", "replace", "lower", "upper", "swapcase", "title", "capitalize", "strip", "lstrip"),
    *("rstrip", "removeprefix", "removesuffix", "format", "decode", "split", "casefold", "fromhex"),
}
#: What a path to the submission's own folder is computed with.
PATH_TOOLS = ("os.path", "os.getcwd", "os.curdir", "os.pardir", "pathlib", "sys.path")
#: How a file of `numpy.save` begins, and the types whose bytes are not a pickle.
ARRAY = b"\x93NUMPY"
NUMBERS = re.compile(r"[<>|=]?[?bBiufcSUVmM][0-9]*(\[\w+\])?")
LONGEST_HEADER = 1 << 20
#: Instructions of a pickle that import or build by name.
IMPORTING = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}
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
        start = file.read(len(ARRAY))
        if start.startswith(b"\x7fELF"):
            return "compiled code"
        if zipfile.is_zipfile(path):
            return "" if _only_arrays(path) else "archive"
        if start == ARRAY:
            return "" if _holds_numbers(file) else "pickle"
        file.seek(0)
        return "pickle" if path.endswith(".npy") or _is_pickle(file) else ""


def _holds_numbers(file: IO[bytes]) -> bool:
    """Whether the header of an array, after its first six bytes, says only numbers and text."""
    try:
        major, _ = file.read(2)
        length = int.from_bytes(file.read(2 if major == 1 else 4), "little")
        types = _types(ast.literal_eval(file.read(min(length, LONGEST_HEADER)).decode())["descr"])
        return all(NUMBERS.fullmatch(one) for one in types)
    except (SyntaxError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
        return False


def _types(descr: object) -> Iterator[str]:
    """The types in the description of an array: one, or (name, type, shape) of each field."""
    if isinstance(descr, list):
        for field in descr:
            yield from _types(field[1])
    elif isinstance(descr, tuple):  # a type and a shape
        yield from _types(descr[0])
    else:
        yield str(descr)


def _is_pickle(file: IO[bytes]) -> bool:
    """A whole pickle that names something to import: numbers alone run nothing."""
    names = False
    try:
        for opcode, argument, _ in pickletools.genops(file):
            names |= opcode.name in IMPORTING and _is_name(argument)
    except Exception:  # no pickle: the reader raises whatever the bytes lead it to
        return False
    return names


def _is_name(argument: object) -> bool:
    """Whether an instruction names a module and something in it; prose is not a name."""
    return not isinstance(argument, str) or bool(re.fullmatch(r"[\w.]+ [\w.]+", argument))


def _only_arrays(path: str) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return all(_is_plain(archive, name) for name in archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError, RuntimeError, OSError):
        return False


def _is_plain(archive: zipfile.ZipFile, name: str) -> bool:
    if not name.endswith(".npy"):
        return False
    with archive.open(name) as file:
        start = io.BytesIO(file.read(LONGEST_HEADER))
    return start.read(len(ARRAY)) == ARRAY and _holds_numbers(start)


def _in_module(tree: ast.Module, files: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each place; `files` are the paths of the submission's modules."""
    module = _Module(imported_names(tree), _assigned_once(tree), files)
    own = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for parent in ast.walk(tree):
        line = getattr(parent, "lineno", 0)
        for what in _in_node(parent, module, own):
            yield line, what
        for node in ast.iter_child_nodes(parent):
            for what in _in_place(node, parent, module):
                yield getattr(node, "lineno", line), what
    yield from _started(tree, module)
    yield from _moved(tree, module)


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
    return _held(".".join([aliases[node.id], *reversed(parts)]))


def _held(name: str) -> str:
    """`numpy.lib.format.pickle.loads` as `pickle.loads`."""
    parts = name.split(".")
    places = [place for place, part in enumerate(parts) if part in HELD]
    return name if parts[0] == "asyncio" or not places else ".".join(parts[places[-1] :])


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


def _in_node(node: ast.AST, module: "_Module", own: set[str]) -> Iterator[str]:
    aliases = module.aliases
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _loads_code(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        whole = (f"{node.module}.{alias.name}" for alias in node.names)
        yield from (name for name in whole if _loads_code(name))
    elif isinstance(node, ast.Name) and node.id in BUILTINS - own - set(aliases):
        yield node.id
    elif isinstance(node, ast.Attribute):
        if node.attr in ATTRIBUTES:
            yield node.attr
        elif _loads_code(name := dotted_name(node, aliases)):
            yield name
    elif isinstance(node, ast.Subscript) and dotted_name(node.value, aliases) == "sys.modules":
        yield from _in_modules(node.slice)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        yield from _in_namespace(node.value, node.slice, module)
    elif isinstance(node, ast.Call):
        yield from _in_call(node, module)
        yield from _in_timer(node, aliases, own)


def _in_place(node: ast.AST, parent: ast.AST, module: "_Module") -> Iterator[str]:
    """What depends on where it stands, and texts that hide a name in pieces."""
    if isinstance(node, ast.BinOp | ast.JoinedStr | ast.Call | ast.Subscript):
        text = _computed_text(node, module)
        yield from [f"the computed text {text!r}"] if text in {*BUILTINS, *TEXTS} else []
    is_method = isinstance(parent, ast.Attribute)
    if isinstance(node, ast.Constant) and node.value in TEXTS:
        asks = isinstance(parent, ast.Call) and ast.unparse(parent.func) in ("getattr", "hasattr")
        if not (asks and node.value == "__annotations__"):
            yield str(node.value)
    elif isinstance(node, ast.Attribute) and node.attr == "__annotations__":
        # Resolving the annotations runs the text that is put there.
        is_set = not isinstance(getattr(parent, "ctx", None) or ast.Load(), ast.Load)
        if is_set or not isinstance(node.ctx, ast.Load) or (is_method and parent.attr in SETTERS):  # type: ignore[attr-defined]
            yield "changed annotations"
    elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
        name = dotted_name(node, module.aliases)
        if name in ("sys.path", "sys.modules") and not _only_reads(node, parent):
            yield f"another name for {name}"


def _only_reads(node: ast.AST, parent: ast.AST) -> bool:
    """Whether a list or mapping is used where it stands, and not kept under another name."""
    if isinstance(parent, ast.Call):
        return ast.unparse(parent.func) in READERS or node is parent.func
    if isinstance(parent, ast.Attribute):
        return parent.attr not in ("__iadd__", "__imul__", "__ior__", "__getattribute__")
    if isinstance(parent, ast.For | ast.comprehension):
        return node is parent.iter
    kept = ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.Return | ast.Yield | ast.arguments
    return not isinstance(parent, kept | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.keyword)


def _in_namespace(value: ast.expr, key: ast.expr, module: "_Module") -> Iterator[str]:
    """A name of a module that is looked up in its dictionary, by a text that cannot be read."""
    space = module.value(value)
    is_call = isinstance(space, ast.Call) and isinstance(space.func, ast.Name) and not space.args
    name = space.func.id if is_call else ""  # type: ignore[union-attr]
    if isinstance(space, ast.Attribute) and space.attr == "__dict__":
        name = dotted_name(space.value, module.aliases)
    elif name not in ("globals", "locals", "vars"):
        return
    if name and _computed_text(key, module) is None and not _is_harmless(key, module):
        yield f"computed name of {name}"


def _is_harmless(key: ast.expr, module: "_Module") -> bool:
    """No text, or one that begins as no dangerous name does."""
    if isinstance(key, ast.Constant | ast.Slice):
        return True
    parts = key.values if isinstance(key, ast.JoinedStr) else [getattr(key, "left", key)]
    start = _computed_text(parts[0], module) if parts else None
    return bool(start) and not any(name.startswith(str(start)) for name in {*BUILTINS, *TEXTS})


def _computed_text(node: ast.AST, module: "_Module") -> str | None:
    """The text that an expression of nothing but literals gives; None where it is not known."""
    try:
        found = _computed(node, module, 12)
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError, LookupError):
        return None
    return found if isinstance(found, str) else None


def _computed(node: ast.AST | None, module: "_Module", depth: int) -> Any:
    """The value of a small expression over literals; ValueError for any other."""
    if depth == 0:
        raise ValueError("too deep")
    known = partial(_computed, module=module, depth=depth - 1)
    node = module.value(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes | int | None):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [known(part) for part in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return known(node.left) + known(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        right = known(node.right)
        return str(known(node.left)) % (tuple(right) if isinstance(right, list) else right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(str, map(known, node.values)))
    if isinstance(node, ast.FormattedValue) and node.format_spec is None:
        return known(node.value)
    if isinstance(node, ast.Call) and not node.keywords:
        return _called_on_text(node, known)
    return _part_of_text(node, known)


def _part_of_text(node: ast.AST | None, known: Callable[[ast.AST], Any]) -> Any:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -known(node.operand)
    if isinstance(node, ast.Slice):
        ends = (node.lower, node.upper, node.step)
        return slice(*(None if end is None else known(end) for end in ends))
    if isinstance(node, ast.Subscript):
        return known(node.value)[known(node.slice)]
    raise ValueError("not a literal")


def _called_on_text(call: ast.Call, known: Callable[[ast.AST], Any]) -> Any:
    given = [known(argument) for argument in call.args]
    if isinstance(call.func, ast.Name) and call.func.id in TEXT_FUNCTIONS:
        return TEXT_FUNCTIONS[call.func.id](*given)
    if isinstance(call.func, ast.Attribute) and call.func.attr in TEXT_METHODS:
        text = known(call.func.value)
        if isinstance(text, str | bytes):
            return getattr(text, call.func.attr)(*given)
    raise ValueError("not a literal")


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


def _in_call(call: ast.Call, module: "_Module") -> Iterator[str]:
    name, args = module.called(call.func), call.args
    if name == "functools.partial" and args:
        name, args = module.called(args[0]), args[1:]
    for keyword in call.keywords:
        yield from _in_keyword(keyword, name)
    if name == "numpy.load" and (len(args) > 2 or any(isinstance(a, ast.Starred) for a in args)):
        yield "allow_pickle"
    if name == "sys.modules.get":
        yield from (what for key in args[:1] for what in _in_modules(key))
    if name in ("operator.attrgetter", "operator.methodcaller"):
        yield from (name for key in args[:1] if not isinstance(key, ast.Constant))
    if name == "pytest.main" and not _runs_own_tests(args, module):
        yield "pytest.main of other files"
    if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "vars", "setattr") and args:
        yield from _in_lookup(call, module.aliases)
    if isinstance(call.func, ast.Attribute) and call.func.attr in GETTERS and args:
        yield from _in_namespace(call.func.value, args[0], module)


def _in_keyword(keyword: ast.keyword, name: str) -> Iterator[str]:
    """`name` is what is called."""
    is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
    if keyword.arg in ("allow_pickle", "eval_str") and not is_off:
        yield keyword.arg
    elif keyword.arg == "weights_only" and name == "torch.load" and is_off:
        yield "torch.load of whole objects"
    elif keyword.arg is None and name in SWITCHED:
        yield f"{name} with computed arguments"
    elif (keyword.arg or "").startswith("co_"):
        yield f"a code object with another {keyword.arg}"


def _runs_own_tests(args: list[ast.expr], module: "_Module") -> bool:
    words = module.value(args[0]) if args else ast.List(elts=[])
    if not isinstance(words, ast.List | ast.Tuple):
        return False
    plain = (module.value(word) for word in words.elts)
    return all((_text(w) or "").startswith("-") or not _unread_file(w, module) for w in plain)


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


def _loads_code(whole: str) -> bool:
    name = _held(whole)
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
    watched = {*STARTERS, "numpy.load"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            judged |= {id(node.func), *_judged_arguments(node, module)}
            if (name := module.called(node.func)) in STARTERS and (what := _unread(node, module)):
                yield node.lineno, f"{name} of {what}"
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in judged:
            if isinstance(node.ctx, ast.Load) and (name := module.called(node)) in watched:
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and node.value in PRELOADS:
            yield node.lineno, str(node.value)
        for path in _import_paths(node, module):
            if not _is_own_folder(path, module):
                yield path.lineno, "import from another folder"


def _moved(tree: ast.Module, module: _Module) -> Iterator[tuple[int, str]]:
    """Leaves its folder and adds paths to import from, which may mean the new one."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    moves = [call for call in calls if module.called(call.func) in MOVERS]
    if not any(True for node in ast.walk(tree) for _ in _import_paths(node, module)):
        return
    for call in moves:
        if not all(_is_own_folder(place, module) for place in call.args):
            yield call.lineno, "import from another folder"


def _judged_arguments(call: ast.Call, module: _Module) -> Iterator[int]:
    """`numpy.load` in `partial(numpy.load, …)`, which is judged as a call, and in `map`."""
    is_map = isinstance(call.func, ast.Name) and call.func.id == "map" and len(call.args) == 2
    is_call = is_map or module.called(call.func) == "functools.partial"
    if is_call and call.args and module.called(call.args[0]) == "numpy.load":
        yield id(call.args[0])


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
