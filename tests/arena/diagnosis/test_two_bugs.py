"""Two bugs at once: both are named, and no third."""

import pytest

from trapline.arena.certify.diagnosis import DiagnosisCertifier
from trapline.arena.challenge import load
from trapline.arena.judge.diagnosis import Diagnoser


@pytest.mark.parametrize(
    ("challenge", "one", "other", "seed"),
    [
        # Together they answer one check as a third bug does.
        ("beam_search", "length-one-too-long", "ranked-by-sum", 11),
        # A third bug explained most checks, until both were known.
        pytest.param(
            "beam_search",
            "only-the-best-is-cut-off",
            "immediate-end-forbidden",
            11,
            marks=pytest.mark.full,
        ),
        # Neither answers its own trap as it does alone.
        pytest.param(
            "beam_search", "only-the-best-beam-ends", "worst-first", 11, marks=pytest.mark.full
        ),
        # The judge's model refused a prefix: the same exception as a bug's that refuses a setting.
        ("beam_search", "pool-keeps-the-first", "prefix-without-its-prompt", 13),
        # Neither alone gives any of the answers.
        ("flash_attention_forward", "hidden-scores-zero", "mask-transposed", 11),
        ("layer_norm_backward", "rstd-missing", "output-overwrites-cache", 12),
        # The other bug ended the check at a call without the first one's trigger.
        ("fused_softmax_topk", "strided-logits", "sum-without-the-maximum", 11),
        ("layer_norm_backward", "batch-of-one", "eps-outside-the-root", 11),
        ("layer_norm_backward", "zero-gamma", "eps-added-twice", 11),
    ],
)
def test_two_bugs_are_named_and_no_third(challenge, one, other, seed):
    challenge = load(challenge)
    traps = {trap.id: trap for trap in challenge.traps}
    files = traps[other].plant(traps[one].plant(challenge.solution_files()))
    with DiagnosisCertifier(challenge, seed) as certifier:
        host = certifier.host(seed)
        failures = list(certifier.failures(host, files, (one, other)))
        found = Diagnoser(challenge, host, failures).diagnose().findings
    assert sorted(finding.cause for finding in found) == sorted([one, other])
    assert {finding.certainty for finding in found} == {"confirmed"}
