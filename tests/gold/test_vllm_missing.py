"""vLLM's attention backend where vLLM is not installed."""

import importlib
import sys

import pytest

pytest.importorskip("torch")


def test_import_without_vllm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backend", None)
    monkeypatch.delitem(sys.modules, "trapline.gold.vllm", raising=False)
    with pytest.raises(ImportError, match=r"needs vLLM 0\.33: pip install 'trapline\[vllm\]'"):
        importlib.import_module("trapline.gold.vllm")
