"""How our own code is loaded: statement by statement, each compiled once."""

import numpy as np
import pytest

from trapline.arena.errors import SubmissionDied
from trapline.arena.process import local, wire
from trapline.arena.process.proxy import Submission

LINES = "\n".join(f"L{n} = {n}" for n in range(40))
TRICKY = '''"""First line.

at_the_margin = "not code"
"""
import functools
# a comment

@functools.lru_cache
def f(x):
    """Text
at the margin = 3
    """
    return x + 1
if f(1) == 2:
    kept = 1
elif f(1) == 3:
    kept = 2
else:
    kept = 3
try:
    raise KeyError
except KeyError:
    caught = [
1,
2,
]
finally:
    ended = True
joined = 1 + \\
2
class C:
    a: int = 3

    def b(self):
        return self.a
value: int = C().b()
'''


def names(module):
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | list | str) and not name.startswith("__")
    }


@pytest.mark.parametrize("text", [TRICKY, "from __future__ import annotations\nx: nothing = 1\n"])
def test_module_in_parts_is_the_module(tmp_path, text):
    (tmp_path / "solution.py").write_text(text)
    parts, whole = local.load(tmp_path), local.load(tmp_path, compile_once=False)
    assert names(parts) == names(whole) != {}
    assert parts.__doc__ == whole.__doc__


def test_error_in_the_text_is_raised(tmp_path):
    (tmp_path / "solution.py").write_text("x = 1\ndef f(:\n    pass\n")
    with pytest.raises(SyntaxError):
        local.load(tmp_path)


def test_only_changed_statements_are_compiled_again(tmp_path, monkeypatch):
    compiled = []
    compile_one = local._compiled.__wrapped__
    monkeypatch.setattr(
        local, "_compiled", local.lru_cache(lambda *a: compiled.append(a) or compile_one(*a))
    )
    for name in ("solution", "other"):
        (tmp_path / f"{name}.py").write_text(LINES if name == "other" else f"import other\n{LINES}")
    local.load(tmp_path)
    compiled.clear()
    (tmp_path / "other.py").write_text(LINES.replace("= 7", "= 70"))
    assert local.load(tmp_path).other.L7 == 70
    assert [text for text, _ in compiled] == ["L7 = 70\n"]


ARRAY = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "value",
    [
        (None, True, 2**70, -0.0, float("inf"), "text"),
        [ARRAY, (ARRAY.astype(np.float32), [np.int8(3)])],
        (np.zeros((0, 3)), np.array(5), np.array([True]), np.float64(1.5)),
        {"a": ARRAY, 3: (ARRAY, {})},
        ARRAY[:, ::2],
        ARRAY.T,
        ARRAY.astype(">f8"),
        [[[[[[[ARRAY]]]]]]],
        list(range(1500)),
    ],
)
@pytest.mark.parametrize("keep_strides", [True, False])
def test_copy_is_what_travels_over_the_channel(monkeypatch, value, keep_strides):
    quick = local._copied(value, None, None, keep_strides)
    monkeypatch.setattr(local, "_SCALARS", frozenset())
    monkeypatch.setattr(local, "_MOST_ITEMS", -1)
    assert described(quick) == described(local._copied([value], None, None, keep_strides)[0])
    for copied, given in zip(wire.arrays_in(quick), wire.arrays_in(value), strict=True):
        assert copied.flags.writeable
        assert not np.may_share_memory(copied, given)


def described(value):
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.str, value.shape, value.strides, value.tolist()
    if isinstance(value, list | tuple):
        return type(value), [described(item) for item in value]
    if isinstance(value, dict):
        return [(described(key), described(item)) for key, item in value.items()]
    return type(value), value


@pytest.mark.parametrize(
    "value", [np.array(["text"]), np.zeros(2, np.clongdouble), np.zeros(1, object), {1, 2}]
)
def test_copy_refuses_what_the_channel_refuses(value):
    with pytest.raises(wire.UnsendableError):
        local._copied((1, value), None, None, False)


def test_files_that_are_in_no_folder_run_in_another_process_too(tmp_path, sorting):
    files = {
        "solution.py": "import other\ndef answer():\n    return other.X\n",
        "other.py": "X = 5",
    }
    folder, config = tmp_path / "mutant", sorting.sandbox_config("process")
    with local.LocalSubmission(folder, config, files=files) as submission:
        assert submission.answer() == 5
        assert not folder.exists()
        assert Submission.fresh(submission).answer() == submission.fresh().answer() == 5


COUNTING = """
CALLS = []
class Counter:
    pass
def count():
    CALLS.append(1)
    return len(CALLS)
def counter():
    return Counter()
def take(counter):
    return 1
"""


@pytest.fixture
def counting(tmp_path, sorting):
    config, files = sorting.sandbox_config("process"), {"solution.py": COUNTING}
    with local.LocalSubmission(tmp_path / "mutant", config, files=files) as submission:
        yield submission


def test_clean_code_of_ours_knows_nothing_of_earlier_calls(counting):
    assert [counting.count(), counting.count()] == [1, 2]
    clean = counting.clean()
    assert [clean.count(), counting.count(), clean.count()] == [1, 3, 2]
    assert len(counting.transcript.exchanges) == 5


def test_clean_code_of_ours_has_no_objects_of_the_other(counting):
    """As a submission in another process."""
    counter = counting.counter()
    assert counting.take(counter) == 1
    for other in (counting.clean(), counting.fresh()):
        with pytest.raises(SubmissionDied, match="the object died with its process"):
            other.take(counter)
