"""NumPy inside a sandbox lacks docstrings and hints until they are asked for, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trapline.arena.process import numpy_start

#: Runs in a process that has not imported NumPy.
SAYS = """
import json, sys
sys.path.append(sys.argv[1])
import numpy_start
{before}
import numpy as np
loaded = sorted(name for name in sys.modules if name.startswith("numpy"))
public = {{name: sorted(vars(getattr(np, name))) for name in ("linalg", "lib", "_core")}}
print(json.dumps([loaded, sorted(set(dir(np))), public, {asked}]))
"""
LEFT_OUT = {*numpy_start._DOCSTRINGS, numpy_start._HINTS}


def said(asked="None", before="numpy_start.import_numpy()"):
    folder = str(Path(numpy_start.__file__).parent)
    command = [sys.executable, "-c", SAYS.format(asked=asked, before=before), folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_all_but_docstrings_and_hints_is_imported():
    modules, names, public, _ = said()
    all_modules, all_names, all_public, _ = said(before="")
    hints = {name for name in all_modules if name.startswith(numpy_start._HINTS)}
    assert set(modules) == set(all_modules) - LEFT_OUT - hints
    assert set(names) == set(all_names) - {"_typing"}
    assert public == all_public


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        # Hints of a submission are the real ones.
        ("str(__import__('numpy.typing').typing.NDArray[np.float32])", None),
        ("np.linalg.svd(np.eye(2)).S.tolist()", [1.0, 1.0]),
        ("np.linalg.eig(np.eye(1))._fields", ["eigenvalues", "eigenvectors"]),
        ("float(np.random.default_rng(3).random())", float(np.random.default_rng(3).random())),
        ("__import__('gc').isenabled()", True),
    ],
)
def test_what_is_asked_for_is_there(asked, answer):
    assert said(asked)[3] == (said(asked, before="")[3] if answer is None else answer)
