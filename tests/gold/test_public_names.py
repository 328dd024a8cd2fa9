import importlib
import subprocess
import sys

import pytest

import trapline.gold as gold


@pytest.mark.parametrize("name", gold.__all__)
def test_public_names_are_defined_in_their_modules(name):
    home = importlib.import_module(f"trapline.gold.{gold._HOMES[name]}")
    assert getattr(gold, name) is getattr(home, name)
    assert name in dir(gold)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'layernorm'"):
        gold.layernorm  # noqa: B018 - looking is the test


@pytest.mark.parametrize("first", ["", "from trapline.gold.softmax_topk import oracle\n"])
def test_a_function_is_not_hidden_by_its_folder(first):
    """`softmax_topk` is a function and a folder; which one was imported first must not matter."""
    code = f"{first}from trapline.gold import softmax_topk\nprint(callable(softmax_topk))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
