"""Bugs of other authors that once sprang dozens of traps: one finding each, the right one."""

from pathlib import Path
from tempfile import TemporaryDirectory

import corpus
import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.checks import run_checks
from trapline.arena.judge.diagnosis import diagnose
from trapline.arena.judge.mutants import MutantHost
from trapline.arena.process.local import LocalSubmission


def findings(challenge, style, *edits):
    """The findings of a right answer of the corpus in which some texts are replaced."""
    answer = next(answer for answer in corpus.right(challenge) if answer.name == style)
    source = answer.files["solution.py"]
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    loaded, failures = load(challenge), []
    slow = getattr(loaded.module("cases"), "SLOW", ())
    checks = [check for check in (*loaded.cases, *loaded.traps) if check.id not in slow]
    with TemporaryDirectory() as folder:
        Path(folder, "solution.py").write_text(source)
        config = loaded.sandbox_config("process", loaded.plan.limits.mutant_seconds)
        with LocalSubmission(Path(folder), config) as submission:
            run_checks(checks, submission, corpus.SEED, lambda *one: failures.append(one))
            with MutantHost(loaded, corpus.SEED) as host:
                return diagnose(loaded, failures, submission, host).findings


@pytest.mark.parametrize(
    ("challenge", "style", "old", "new", "cause"),
    [
        pytest.param(
            "fused_softmax_topk",
            "running-objects",
            'np.argsort(-values, axis=1, kind="stable")[:, : self.k]',
            'np.argsort(values, axis=1, kind="stable")[:, ::-1][:, : self.k]',
            "ties-to-the-higher-index",
            id="wrong-tie-at-the-cut",
        ),
        pytest.param(
            "kv_cache",
            "journal-loops",
            "sees = len(keys[0]) - n + i + 1",
            "sees = len(keys[0])",
            "no-causal-mask",
            id="missing-causal-mask",
        ),
        pytest.param(
            "beam_search",
            "plain-loops",
            "offer(pools[i], beam_width, new_total / length**penalty, tokens + [token])",
            "offer(pools[i], beam_width, total / length**penalty, tokens + [token])",
            "end-costs-nothing",
            id="end-costs-nothing",
        ),
        pytest.param(
            "flash_attention_forward",
            "key-outer",
            "scores = np.where(np.arange(lo, hi)[None, :] <= limit, scores, -np.inf)",
            "scores = scores + np.where(np.arange(lo, hi)[None, :] <= limit, 0.0, -1e9)",
            "finite-mask-added",
            id="finite-mask-added",
        ),
        pytest.param(
            "flash_attention_backward",
            "key-major-functional",
            "> last[:, None], -np.inf, 0)",
            "> last[:, None], -1e9, 0)",
            "finite-mask-added",
            id="finite-mask-added-in-both-passes",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "flash_attention_backward",
            "key-major-functional",
            "new = np.maximum(m, s.max(axis=1))",
            "new = np.zeros_like(m)",
            "maximum-forgotten",
            id="maximum-forgotten",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "kv_cache",
            "codec-classes",
            "        self.pool.require(fresh + int(split))\n"
            "        if split:\n"
            "            self.pages[-1] = self.pool.copy(self.pages[-1])\n",
            "        refs = self.pool.refs\n"
            "        copies = [i for i, p in enumerate(self.pages) if split and refs[p] > 1]\n"
            "        self.pool.require(fresh + len(copies))\n"
            "        for i in copies:\n"
            "            self.pages[i] = self.pool.copy(self.pages[i])\n",
            "write-copies-every-shared-page",
            id="write-copies-every-shared-page",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "dflash",
            "level-arrays",
            "new = new[: new.index(eos_id) + 1]",
            "new = new[: len(new) - new[::-1].index(eos_id)]",
            "cut-at-the-last-end",
            id="cut-at-the-last-end",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "dflash",
            "level-arrays",
            "if logp.shape != (tokens.size + 1, q.shape[1]) or not logp.size:",
            "if len(logp) != tokens.size + 1 or not logp.size:",
            "width-of-the-target-unchecked",
            id="width-of-the-target-unchecked",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "ternary_training",
            "closure-tape",
            "    places = _unpack_table()[packed]\n",
            "    read = np.frombuffer(packed.tobytes('A'), np.uint8)\n"
            "    places = _unpack_table()[read.reshape(packed.shape)]\n",
            "strided-codes-misread",
            id="strided-codes-misread",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "ternary_training",
            "closure-tape",
            "sides[_position(document) < fraction]",
            "sides[int(100 * _position(document)) < int(100 * fraction)]",
            "share-rounded",
            id="share-rounded",
            marks=pytest.mark.full,
        ),
    ],
)
def test_one_finding_which_names_the_bug(challenge, style, old, new, cause):
    found = findings(challenge, style, (old, new))
    assert [finding.cause for finding in found] == [cause]
    assert found[0].certainty == "confirmed"


def test_root_of_each_summand_is_named_and_nothing_else():
    (found,) = findings(
        "layer_norm_backward",
        "einsum",
        ("1.0 / np.sqrt(var + eps)", "1.0 / (np.sqrt(var) + np.sqrt(eps))"),
        (
            "1.0 / np.sqrt(spread.astype(np.float64) ** 2 + eps)",
            "1.0 / (spread.astype(np.float64) + np.sqrt(eps))",
        ),
    )
    assert found.cause == "root-of-each-summand"


@pytest.mark.full
def test_crash_on_a_tile_of_one_row_is_reported_by_its_place():
    old = "                qt = q[index][t:t_end] * scale\n"
    new = old + "                if t_end - t == 1 < T:\n                    raise IndexError(t)\n"
    (found,) = findings("flash_attention_forward", "two-sweeps", (old, new))
    assert found.cause == "unnamed"
    assert "IndexError" in found.sentence


@pytest.mark.full
def test_kind_of_cache_that_is_not_offered_is_one_finding():
    old = '    if kind not in ("dense", "paged", "quantized", "paged_quantized"):\n'
    new = '    if kind not in ("dense", "paged", "quantized"):\n'
    (found,) = findings("kv_cache", "journal-loops", (old, new))
    assert "a cache of kind 'paged_quantized' is not offered" in found.sentence
