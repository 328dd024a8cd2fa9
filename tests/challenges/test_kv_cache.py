"""What a diagnosis of KV caches compares, what counts as not offered, and a full pool."""

import numpy as np
import pytest

from trapline.arena.challenge import load
from trapline.arena.judge.mutants import MutantHost
from trapline.arena.process.transcript import Exchange, Transcript
from trapline.challenges.kv_cache.cases import judged, not_offered

SIZES = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "block_size": 4, "num_blocks": 4}


#: Bugs that show only when the pool is full, in a dense and in a paged cache.
AT_A_FULL_POOL = (
    "pool-limit-ignored",
    "pages-beyond-the-pool",
    "full-pool-overwrites-a-neighbour",
    "failed-append-half-written",
    "dense-free-leaks",
)


@pytest.fixture(scope="module")
def host():
    host = MutantHost(load("kv_cache"), 1)
    yield host
    host.close()


@pytest.mark.parametrize("bug", AT_A_FULL_POOL)
def test_decoder_beyond_capacity_notices_what_a_full_pool_does(host, bug):
    assert host.run(bug, "a-decoder-goes-on-beyond-capacity").failed
    assert not host.run(bug, "a-decoder-equals-recomputation").failed


def test_decoder_goes_on_beyond_capacity_with_the_gold_solution(host):
    files = load("kv_cache").solution_files()
    assert not host.run_files(files, "a-decoder-goes-on-beyond-capacity").failed


def refused(kind, bits=None, **changed):
    settings = {**SIZES, "bits": bits, **changed}
    return Transcript([Exchange("make_cache", (kind,), settings, raised="ValueError")])


def test_kind_that_is_refused_is_not_offered():
    assert not_offered(refused("paged_quantized", 4)) == "a cache of kind 'paged_quantized'"
    assert not_offered(refused("dense")) == "a cache of kind 'dense'"


def test_refusing_bad_input_is_no_missing_kind():
    assert not not_offered(refused("sparse"))
    assert not not_offered(refused("quantized", 3))
    assert not not_offered(refused("dense", num_blocks=0))


def test_method_that_is_not_implemented_is_not_offered():
    fork = Exchange("fork", (0,), {}, raised="NotImplementedError")
    assert not_offered(Transcript([fork])) == "fork as asked for here"
    assert not not_offered(Transcript([Exchange("fork", (0,), {}, raised="KeyError")]))


def test_numbers_and_sizes_of_ones_own_are_not_compared():
    assert judged("add", 7) is None
    assert judged("nbytes", 4096) is None
    assert judged("length", 3) == 3


def test_rows_count_in_float32_with_their_dtype_and_digits():
    rows = np.array([1 / 3, 0.5])
    dtype, narrow, values = judged("view", (rows, rows))[0]
    assert (dtype, narrow) == ("float64", False)
    assert values.dtype == np.float32
    assert judged("view", (rows.astype(np.float32).astype(float), rows))[0][1] is True


def test_only_the_named_terms_of_a_budget_are_compared():
    terms = {"bytes_per_token": 4, "budget_bytes": 10.0, "free": 3}
    assert judged("max_context", (2, terms)) == [2, 4.0, 10.0]
