"""Code that the inspector does not read is found and costs the `code` score."""

import ast
import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from trapline.arena.judge import code_from_data
from trapline.arena.judge.inspection import code_dimension, inspect
from trapline.arena.judge.own_tests import own_tests

SP = "import subprocess, sys\nsubprocess"
HIDDEN = {
    "exec(open('x').read())": "exec",
    "run = eval\nrun('1')": "eval",
    "f = compile('1', 'x', 'eval')": "compile",
    "import marshal\nmarshal.loads(b'')": "marshal",
    "from pickle import loads": "pickle.loads",
    "import numpy as np\nnp.load('x.npy', allow_pickle=True)": "allow_pickle",
    "import numpy as np\nnp.load('x.npy', None, True)": "allow_pickle",
    "import numpy as np\nnp.load('x.npy', **{'allow_' + 'pickle': True})": "computed arguments",
    "import numpy as np\nnp.ctypeslib.load_library('x', '.')": "ctypeslib",
    "import ctypes\nctypes.CDLL('./x.so')": "ctypes",
    "import importlib.util": "importlib.util",
    "import importlib\nimportlib.import_module('a' + 'b')": "importlib",
    "__import__('o' + 's')": "__import__",
    "import builtins\ngetattr(builtins, 'ex' + 'ec')('1')": "builtins",
    "import numpy as np\ngetattr(np, 'lo' + 'ad')('x')": "computed name of numpy",
    "globals()['__builtins__']": "__builtins__",
    "().__class__.__base__.__subclasses__()": "__subclasses__",
    "import runpy\nrunpy.run_path('data.txt')": "runpy",
    "import types\ntypes.FunctionType(c, {})": "types.FunctionType",
    "(lambda: 0).__code__": "__code__",
    "import cProfile\ncProfile.run(open('x').read())": "cProfile",
    "import timeit\ntimeit.timeit(open('x').read(), number=1)": "timeit.timeit",
    "import timeit\ntimeit.timeit(setup=open('x').read())": "timeit.timeit",
    "import doctest\ndoctest.testfile('x')": "doctest.testfile",
    "import trace\ntrace.Trace().run('x')": "trace",
    "import site\nsite.addsitedir('.')": "site",
    "import pydoc\npydoc.locate('builtins.exec')": "pydoc",
    "import pkgutil\npkgutil.resolve_name('builtins:exec')": "pkgutil",
    "from logging.config import dictConfig": "logging.config.dictConfig",
    "import typing\ntyping.ForwardRef(open('x').read())": "typing.ForwardRef",
    "from multiprocessing import reduction": "multiprocessing.reduction",
    "import sys\nsys.modules['builtins'].exec('1')": "sys.modules['builtins']",
    "import sys\nsys.modules.get('built' + 'ins').exec('1')": "computed name of sys.modules",
    "import inspect\ninspect.currentframe().f_builtins['exec']('1')": "f_builtins",
    "getattr(frame, 'f_builtins')": "f_builtins",
    "import operator\noperator.attrgetter('ex' + 'ec')(module)": "operator.attrgetter",
    "import torch\ntorch.load('x', weights_only=False)": "torch.load",
    "import torch\ntorch.ops.load_library('x')": "torch.ops.load_library",
    "import os\nos.system('python x')": "os.system",
    "import os\nos.execv('/usr/bin/python3', ['python3', 'data.txt'])": "os.execv",
    "import asyncio\nasyncio.create_subprocess_shell('x')": "asyncio.create_subprocess_shell",
    "import subprocess\nsubprocess.getoutput('python data.txt')": "subprocess.getoutput",
    f"{SP}.run([sys.executable, 'data.txt'])": "subprocess.run of data.txt",
    f"{SP}.run('python3 data.txt', shell=True)": "subprocess.run of data.txt",
    f"{SP}.run('python3 -c 0 | sh', shell=True)": "of a line for a shell",
    f"{SP}.run(['sh', 'data.txt'])": "subprocess.run of sh",
    f"{SP}.run([sys.executable, '-c', open('data.txt').read()])": "of computed code",
    f"{SP}.run([sys.executable, '-c', 'exec(open(0).read())'])": "python -c with exec",
    f"{SP}.run([sys.executable, '-c', f'x = {{text}}'])": "of computed code",
    f"{SP}.run([sys.executable], input=open('data.txt').read())": "of standard input",
    f"{SP}.run([sys.executable, '-'], input=text)": "of standard input",
    f"{SP}.run([sys.executable, '-B', '-m', 'timeit', text])": "of python -m timeit",
    f"{SP}.Popen(open('data.txt').read().split())": "subprocess.Popen of a computed command",
    f"{SP}.run(**options)": "subprocess.run of a computed command",
    f"{SP}.run(['true'], executable='./data')": "of a computed command",
    f"{SP}.run([sys.executable, '-m', 'pytest'], cwd='/tmp')": "of a command in another folder",
    f"COMMAND = [sys.executable, 'data.txt']\n{SP}.check_call(COMMAND)": "of data.txt",
    f"def start(command):\n    pass\ncommand = ['true']\n{SP}.run(command)": "computed command",
    "from subprocess import run as start\nstart(['./data'])": "subprocess.run of data",
    "import subprocess\nstart = subprocess.run\nstart(['./data'])": "subprocess.run of data",
    "import subprocess\nlist(map(subprocess.run, commands))": "subprocess.run",
    "import subprocess\nstart = subprocess.run\nlist(map(start, commands))": "subprocess.run",
    "import subprocess\ngetattr(subprocess, 'run')(['x'])": "subprocess.run",
    "import sys\nsys.path.insert(0, '/tmp')": "import from another folder",
    "import sys\nsys.path.append(open('data.txt').read())": "import from another folder",
    "import sys\nsys.path += [folder]": "import from another folder",
    "import sys\nsys.path[:0] = ['data']": "import from another folder",
    "import sys, tempfile\nsys.path = [tempfile.gettempdir()]": "import from another folder",
    "import os\nos.environ['PYTHONPATH'] = '/tmp'": "import from another folder",
    "options = {'PYTHONPATH': '/tmp'}": "import from another folder",
    "import os\nos.environ['LD_PRELOAD'] = 'data'": "LD_PRELOAD",
    "globals()['__buil' + 'tins__']": "computed text '__builtins__'",
    "vars(print.__self__)['ex' + 'ec'](text)": "__self__",
    "space['ex' + 'ec'](text)": "computed text 'exec'",
    "FIRST = 'ex'\nspace[f'{FIRST}ec'](text)": "computed text 'exec'",
    "getattr(f, ''.join(['__co', 'de__']))": "computed text '__code__'",
    "getattr(f, '__edoc__'[::-1])": "computed text '__code__'",
    "getattr(f, b'__code__'.decode())": "computed text '__code__'",
    "getattr(f, '%s__' % '__code')": "computed text '__code__'",
    "getattr(f, 'f_' + 'builtins')": "computed text 'f_builtins'",
    "globals()[key](text)": "computed name of globals",
    "space = globals()\nspace.get(key)": "computed name of globals",
    "globals()[f'_{key}']": "computed name of globals",
    "import numpy as np\nnp.__dict__[key]": "computed name of numpy",
    "object.__getattribute__(f, '__globals__')": "__globals__",
    "import sys\n[m for m in sys.modules.values()]": "sys.modules.values",
    "import sys\nknown = sys.modules": "another name for sys.modules",
    "import numpy as np\nload = np.load\nload('x', None, True)": "allow_pickle",
    "import functools, numpy\nfunctools.partial(numpy.load, 'x', None, True)()": "allow_pickle",
    "import numpy as np\nnp.load(*arguments)": "allow_pickle",
    "import numpy as np\nLOADERS = [np.load]": "numpy.load",
    "import numpy as np\nnp.lib.format.pickle.loads(data)": "pickle.loads",
    "from numpy.lib.format import pickle": "numpy.lib.format.pickle",
    "import os\nos.sys.modules['builtins']": "sys.modules['builtins']",
    "import inspect\ninspect.get_annotations(f, eval_str=True)": "eval_str",
    "import inspect\ninspect.signature(f, **{'eval_' 'str': True})": "computed arguments",
    "f.__annotations__ = {'x': text}\ng.register(f)": "changed annotations",
    "f.__annotations__['x'] = text": "changed annotations",
    "f.__annotations__.update(x=text)": "changed annotations",
    "setattr(f, '__annotations__', notes)": "__annotations__",
    "from multiprocessing.connection import Connection": "multiprocessing.connection",
    "import multiprocessing\na, b = multiprocessing.Pipe()\nb.send_bytes(data)": "send_bytes",
    "c.replace(co_code=data)": "a code object with another co_code",
    "__path__.append('/tmp')": "__path__",
    "import engine\nengine.__path__ = ['/tmp']": "__path__",
    "import sys\nwhere = sys.path\nwhere.append('/tmp')": "another name for sys.path",
    "import sys\nadd(sys.path)": "another name for sys.path",
    "import os, sys\nos.chdir('/tmp')\nsys.path.insert(0, '')": "import from another folder",
    "import pytest\npytest.main(['/tmp/x'])": "pytest.main of other files",
    "import timeit\ntimeit.main([text])": "timeit.main",
    "import unittest\nunittest.TestLoader().discover('x')": "unittest.TestLoader",
    "import codecs\ncodecs.register(find)": "codecs.register",
}
SUITE = """\
from solution import answer


def test_answer():
    assert answer() == 42
"""
INNOCENT = [
    "import re\nre.compile('x')",
    "from re import compile\ncompile('x')",
    "import ast\nast.literal_eval('[1]')",
    "import numpy as np\nnp.load('x.npy')",
    "import numpy as np\nnp.load('x.npy', allow_pickle=False)",
    "model.eval()",
    "def compile(x):\n    return x\ncompile(1)",
    "getattr(self, name)",
    "import numpy as np\ngetattr(np, 'float32')",
    "from importlib.metadata import version",
    "import types\ntypes.SimpleNamespace()",
    "import timeit\ntimeit.timeit(lambda: run(1), number=3)",
    "import timeit\ndef run(): ...\ntimeit.repeat(run)",
    "import timeit\ntimeit.default_timer()",
    "import sys\nsys.modules[__name__]",
    "import sys\nsys.modules['torch']",
    "import operator\nsorted(rows, key=operator.attrgetter('length'))",
    "import torch\ntorch.load('x', weights_only=True)",
    "import doctest\ndoctest.testmod()",
    "getattr(self, 'name')",
    "import json\nTABLE = json.loads(open('table.json').read())",
    f"{SP}.run(['nvidia-smi', '--query-gpu=name'], capture_output=True)",
    f"{SP}.check_output('uname -m', shell=True)",
    f"{SP}.run([sys.executable, '-m', 'pytest', '-q'])",
    f"{SP}.run([sys.executable, '-m', 'solution'])",
    f"{SP}.run([sys.executable, 'solution.py', '--size', '3'])",
    f"{SP}.run([sys.executable, __file__])",
    f"{SP}.run([sys.executable, '-c', 'import solution; solution.run(3)'])",
    f"{SP}.run([sys.executable, '-c', f'import solution; solution.run({{size!r}})'])",
    f"from textwrap import dedent\nCODE = dedent('x = 1')\n{SP}.run([sys.executable, '-c', CODE])",
    "import subprocess\ndef wait(one: subprocess.Popen[str]) -> None:\n    one.wait()",
    "import subprocess\ntry:\n    pass\nexcept subprocess.TimeoutExpired:\n    pass",
    "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))",
    "import sys\nfrom pathlib import Path as P\nsys.path.append(str(P(__file__).resolve().parent))",
    "import os, sys\nHERE = os.path.dirname(__file__)\nsys.path[:0] = [HERE, os.getcwd()]",
    "import sys\nsys.path.insert(0, '..')\nprint(sys.path)",
    "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))",
    "import os\nos.environ.get('PYTHONPATH')",
    "import numpy as np\nload = np.load\nload('x.npy')",
    "import numpy as np\narrays = list(map(np.load, files))",
    "import functools, numpy as np\nread = functools.partial(np.load, mmap_mode='r')",
    "globals()['table']",
    "globals()[f'kernel_{size}'](x)",
    "globals()['kernel_' + size](x)",
    "globals()[name] = f",
    "vars(self)[name]",
    "self.__dict__[name]",
    "NAME = 'a' + 'b'\nTEXT = f'{NAME} ' + ', '.join(['exec', 'eval'])",
    "CHOICES = ('exec', 'compile')",
    "getattr(f, '__annotations__', {})",
    "print(f.__annotations__['x'])",
    "import inspect\ninspect.signature(f).parameters",
    "import inspect\ninspect.get_annotations(f, eval_str=False)",
    "import functools\n@functools.singledispatch\ndef f(x): ...\n@f.register\ndef g(x: int): ...",
    "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: 'int' = 0",
    "from multiprocessing import Pool\nwith Pool(2) as pool:\n    pool.map(f, rows)",
    "import sys\nfor place in sys.path:\n    print(place)",
    "import sys\nprint(sys.path, 'x' in sys.path, 'numpy' in sys.modules)",
    "import os, sys\nsys.path = [os.path.dirname(__file__), *sys.path]",
    "import os\nos.chdir('/tmp')",
    "import pytest\npytest.main([__file__, '-q'])",
    "import pytest\npytest.main(['-q', 'solution.py'])",
    "import unittest\nunittest.main()",
    "text.encode().decode()[::-1].join(parts)",
]


def findings(source, folder):
    return code_from_data.findings({"solution.py": ast.parse(source)}, str(folder))


@pytest.mark.parametrize("source", HIDDEN)
def test_code_from_data_is_found_and_named(source, tmp_path):
    found = findings(source, tmp_path)
    assert found
    assert any(HIDDEN[source] in one for one in found)
    assert all(one.startswith("solution.py:") for one in found)


@pytest.mark.parametrize("source", INNOCENT)
def test_innocent_use_is_not_a_finding(source, tmp_path):
    assert findings(source, tmp_path) == []


def test_files_that_hold_code_are_found(tmp_path):
    for name in ("a.so", "b.pyc", "c.pkl", "d.so.1"):
        (tmp_path / name).write_bytes(b"")
    np.save(tmp_path / "numbers.npy", np.zeros(3))
    np.save(tmp_path / "objects.npy", np.array(["x"], object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("Vprint(1)\np0\n.")
    found = {one.split()[0] for one in findings("", tmp_path)}
    assert found == {"a.so", "b.pyc", "c.pkl", "d.so.1", "objects.npy", "text.npy"}


def test_code_in_files_with_other_names_is_found(tmp_path):
    np.savez(tmp_path / "numbers.npz", x=np.zeros(3))
    np.savez(tmp_path / "more.npz", x=np.zeros(3))
    for name, mode in (("data.bin", "w"), ("more.npz", "a"), ("solution.py", "a")):
        with zipfile.ZipFile(tmp_path / name, mode) as archive:
            archive.writestr("hidden.py", "x = 1")
    whole = (tmp_path / "data.bin").read_bytes()
    (tmp_path / "broken.bin").write_bytes(whole.replace(b"PK\x01\x02", b"PK\x01\x03"))
    (tmp_path / "library.txt").write_bytes(b"\x7fELF\x02")
    os.mkfifo(tmp_path / "pipe")
    found = dict(one.rsplit(" ", 1) for one in findings("", tmp_path))
    archives = ("broken.bin", "data.bin", "more.npz", "solution.py")
    assert found == {**dict.fromkeys(archives, "archive"), "library.txt compiled": "code"}


def test_pickles_are_found_under_any_name(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / f"weights{protocol}.bin").write_bytes(pickle.dumps(print, protocol))
    plain = io.BytesIO()
    np.save(plain, np.array([print], object), allow_pickle=True)
    (tmp_path / "bare.dat").write_bytes(plain.getvalue().replace(b"'|O'", b"'O' "))
    (tmp_path / "late.dat").write_bytes(
        plain.getvalue().replace(b"'|O'", b"[('x', '<f4', (" + b"1," * 200 + b")), ('y', 'O')]")
    )
    np.savez(tmp_path / "table.npz", x=np.array([print], object))
    found = dict(one.rsplit(" ", 1) for one in findings("", tmp_path))
    names = [f"weights{protocol}.bin" for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    assert found == {
        **dict.fromkeys([*names, "bare.dat", "late.dat"], "pickle"),
        "table.npz": "archive",
    }


def test_numbers_and_texts_are_no_pickles(tmp_path):
    fields = np.dtype([("a", "<f4", (2, 3)), ("b", [("c", "S5"), ("d", "M8[ns]")])])
    arrays = [np.zeros(2, fields), np.array(["x"]), np.zeros(3, bool), np.zeros((), np.complex64)]
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    np.savez_compressed(tmp_path / "all.npz", *arrays)
    (tmp_path / "numbers.bin").write_bytes(np.arange(99.0).tobytes())
    (tmp_path / "notes.txt").write_text("compile this\nand that\n. Then read on.\n")
    (tmp_path / "empty").write_bytes(b"")
    assert findings("", tmp_path) == []


def test_own_module_called_code_is_not_a_finding(tmp_path):
    trees = {"solution.py": ast.parse("import code\ncode.sort(1)"), "code.py": ast.parse("")}
    assert code_from_data.findings(trees, str(tmp_path)) == []


def test_code_from_data_costs_the_code_score(submission_folder, level):
    source = """\
        def answer() -> int:
            \'\'\'Forty-two.\'\'\'
            return int(eval("6 * 7"))
    """
    found = code_dimension(inspect(submission_folder(source), level, 1, 0))
    assert found.score == 0
    assert "runs code that cannot be read: solution.py:3 eval" in found.reason
    honest = submission_folder(source.replace('eval("6 * 7")', "6 * 7"))
    assert code_dimension(inspect(honest, level, 1, 0)).score == 100


def test_tests_of_code_from_data_prove_nothing(submission_folder, sorting, level):
    source = "def answer():\n    return int(eval('6 * 7'))\n"
    honest = submission_folder(source.replace("eval('6 * 7')", "6 * 7"))
    hidden = submission_folder(source)
    scores = []
    for folder in (honest, hidden):
        (folder / "test_answer.py").write_text(SUITE)
        scores.append(own_tests(folder, sorting, level, inspect(folder, level, 1, 4)))
    assert scores[0].score == 100
    assert scores[1].score == 0
    assert "runs code that cannot be read" in scores[1].reason


def test_import_by_a_written_name_counts_as_an_import(submission_folder, level):
    source = "import importlib\n\nSOFTMAX = importlib.import_module('scipy.special').softmax\n"
    assert "scipy.special" in inspect(submission_folder(source), level, 1, 0).code["imports"]
