"""How our own code is loaded: statement by statement, each compiled once."""

import pytest

from trapline.arena.process import local

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
