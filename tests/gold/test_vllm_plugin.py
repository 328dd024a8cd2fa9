"""vLLM's attention backend: its own abstract classes, metadata and cache layouts, on the CPU."""

import inspect
import tomllib
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from trapline.gold.attention import oracle
from trapline.gold.errors import ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention.attention import Attention  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention import backend as theirs  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from trapline.gold import vllm as ours  # noqa: E402 - needs both

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
PAIRS = [
    (theirs.AttentionBackend, ours.TraplineBackend),
    (theirs.AttentionImpl, ours.TraplineImpl),
    (theirs.AttentionMetadataBuilder, ours.TraplineMetadataBuilder),
]
BF16 = "a model of torch.bfloat16"
H, G, D, P, BLOCKS = 4, 2, 8, 16, 12
#: (length, queries) of each sequence; vLLM puts those with one query first and padding last.
BATCHES = {
    "decode": [(5, 1), (17, 1), (1, 1)],
    "fresh": [(7, 7), (20, 20)],
    "decode and fresh": [(18, 1), (7, 7), (16, 16)],
    "decode and chunk": [(33, 1), (20, 4), (7, 7)],
    "draft": [(20, 3), (33, 3)],
    "padded decode": [(18, 1), (0, 0), (0, 0)],
    "padded chunk": [(18, 1), (20, 4), (0, 0)],
}


def shape_of(function):
    parameters = inspect.signature(function).parameters.values()
    return [
        (p.name, p.kind, p.default)
        for p in parameters
        if p.kind is not inspect.Parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize(("base", "made"), PAIRS)
def test_abstract_methods_are_implemented_with_vllms_signatures(base, made):
    assert issubclass(made, base)
    assert base.__abstractmethods__
    assert not made.__abstractmethods__
    shared = [name for name in vars(made) if inspect.isroutine(getattr(base, name, None))]
    assert base.__abstractmethods__ <= {*shared}
    for name in shared:
        assert shape_of(getattr(made, name)) == shape_of(getattr(base, name)), name


def test_signature_of_the_cache_update_is_that_of_vllms_own_backends():
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    update = "do_kv_cache_update"
    assert shape_of(getattr(ours.TraplineImpl, update)) == shape_of(
        getattr(TritonAttentionImpl, update)
    )


def test_entry_point_registers_the_backend():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["vllm.general_plugins"].items()
    custom = AttentionBackendEnum.CUSTOM
    custom.clear_override()
    try:
        for _ in range(2):
            EntryPoint(name, value, "vllm.general_plugins").load()()
        assert custom.get_class() is ours.TraplineBackend
        assert AttentionBackendEnum[ours.TraplineBackend.get_name()] is custom
    finally:
        custom.clear_override()


def test_another_custom_backend_is_kept():
    from vllm.v1.attention.backends.registry import register_backend

    custom = AttentionBackendEnum.CUSTOM
    register_backend(custom, "another.Backend")
    try:
        with pytest.warns(UserWarning, match="VLLM_PLUGINS"):
            ours.register()
        assert custom.get_path() == "another.Backend"
    finally:
        custom.clear_override()


def cache_in(layout):
    """The second of two layers, as vLLM lays it out; what was never written is NaN."""
    sizes = 2, BLOCKS, G, P, 2 * D
    memory = torch.full([sizes[axis] for axis in layout.stride_order], float("nan"))
    return memory.permute(*np.argsort(layout.stride_order).tolist())[1]


class Batch:
    """Random sequences: their queries, keys and values, and vLLM's description of them."""

    def __init__(self, rows):
        rng = np.random.default_rng(0)
        self.lengths, self.queries = zip(*rows, strict=True)
        made = [[rng.normal(size=(n, heads, D)) for n in self.lengths] for heads in (H, G, G)]
        self.q, self.k, self.v = ([x.astype(np.float32) for x in part] for part in made)
        self.ends = np.cumsum([0, *self.queries]).astype(np.int32)
        pages = iter(rng.permutation(np.arange(1, BLOCKS)).tolist())
        self.table = torch.zeros(len(rows), 3, dtype=torch.int32)  # block 0 is vLLM's null block
        for b, length in enumerate(self.lengths):
            for i in range(-(-length // P)):
                self.table[b, i] = next(pages)

    def slots(self, b, start, stop):
        return [int(self.table[b, i // P]) * P + i % P for i in range(start, stop)]

    def tensors(self, part, *, new):
        """The rows of the batch that are new, or those before them, of all sequences."""
        cut = [slice(n - m, n) if new else slice(0, n - m) for n, m in self.rows()]
        return torch.from_numpy(np.concatenate([x[s] for x, s in zip(part, cut, strict=True)]))

    def rows(self):
        return list(zip(self.lengths, self.queries, strict=True))

    def places(self, *, new):
        found = []
        for b, (n, m) in enumerate(self.rows()):
            found += self.slots(b, *((n - m, n) if new else (0, n - m)))
        return torch.tensor(found, dtype=torch.int64)

    def common(self, **changes):
        ends, lengths = torch.from_numpy(self.ends), torch.tensor(self.lengths, dtype=torch.int32)
        given = {
            "query_start_loc": ends,
            "query_start_loc_cpu": ends,
            "seq_lens": lengths,
            "seq_lens_cpu_upper_bound": lengths,
            "num_reqs": len(self.lengths),
            "num_actual_tokens": int(ends[-1]),
            "max_query_len": max(self.queries),
            "max_seq_len": max(self.lengths),
            "block_table_tensor": self.table,
            "slot_mapping": self.places(new=True),
        }
        return theirs.CommonAttentionMetadata(**{**given, **changes})

    def expected(self, **rules):
        out = np.empty((self.ends[-1], H, D))
        for b, (here, stop) in enumerate(pairwise(self.ends)):
            if here == stop:
                continue
            q = self.q[b][len(self.q[b]) - self.queries[b] :]
            one = [x.swapaxes(0, 1)[None] for x in (q, self.k[b], self.v[b])]
            found, _ = oracle.attention(*one, causal=True, **rules)
            out[here:stop] = found[0].swapaxes(0, 1)
        return out


def built(common):
    builder = ours.TraplineMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
    return builder.build(0, common)


def served(batch, impl, cache, metadata, *, hidden=False):
    """The output of a layer as vLLM calls it, padded by three rows that must stay as they are."""
    k, v = (batch.tensors(x, new=False) for x in (batch.k, batch.v))
    impl.do_kv_cache_update(None, k, v, cache, batch.places(new=False))
    rows = torch.cat([batch.tensors(x, new=True) for x in (batch.q, batch.k, batch.v)], 1)
    rows = torch.cat([rows, torch.full((3, H + 2 * G, D), 7.0)])
    q, k, v = rows.split([H, G, G], 1)  # views of one product, as models make them
    impl.do_kv_cache_update(None, k, v, cache, batch.places(new=True))
    output = torch.full_like(q, 7.0)
    if hidden:
        k, v = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    assert impl.forward(None, q, k, v, cache, metadata, output) is output
    assert bool((output[-3:] == 7.0).all())
    return output[:-3].numpy()


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", BATCHES)
def test_forward_equals_the_oracle_in_each_of_vllms_layouts(name, layout):
    batch = Batch(BATCHES[name])
    found = served(batch, ours.TraplineImpl(H, D, 0.3, G), cache_in(layout), built(batch.common()))
    np.testing.assert_allclose(found, batch.expected(scale=0.3), atol=2e-6)


@pytest.mark.parametrize("name", BATCHES)
def test_windows_and_soft_caps(name):
    batch = Batch(BATCHES[name])
    impl = ours.TraplineImpl(H, D, 0.3, G, None, 6, "auto", 2.0)
    found = served(batch, impl, cache_in(KVCacheLayout.LBNHC), built(batch.common()))
    wanted = batch.expected(scale=0.3, window=6, softcap=2.0)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", BATCHES)
def test_vllms_own_layer_writes_the_cache_and_calls_the_backend(name, window):
    """Its `Attention` module in its forward context, and a run that only measures memory."""
    batch, cache = Batch(BATCHES[name]), cache_in(KVCacheLayout.LBNHC)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        layer = Attention(
            *(H, D, 0.3, G),
            per_layer_sliding_window=window,
            prefix="model.layers.0.attn",
            attn_backend=ours.TraplineBackend,
        )
    new = [batch.tensors(x, new=True).flatten(1) for x in (batch.q, batch.k, batch.v)]
    with set_forward_context(None, config, slot_mapping={}):
        assert not layer(*new).any()
    old = (batch.tensors(x, new=False) for x in (batch.k, batch.v))
    layer.impl.do_kv_cache_update(layer, *old, cache, batch.places(new=False))
    layer.kv_cache = cache
    metadata, slots = built(batch.common()), batch.places(new=True)
    with set_forward_context(
        {layer.layer_name: metadata}, config, slot_mapping={layer.layer_name: slots}
    ):
        found = layer(*new)
    wanted = batch.expected(scale=0.3, window=window)
    np.testing.assert_allclose(found.view(-1, H, D).numpy(), wanted, atol=2e-6)
    rows = torch.cat([x.view(-1, G, D) for x in new[1:]], -1)  # a key before its value
    assert torch.equal(cache[slots // P, :, slots % P], rows)


@pytest.mark.parametrize(
    ("name", "decodes", "fresh"),
    [
        ("decode", 3, None),
        ("fresh", 0, True),
        ("decode and fresh", 1, True),
        ("decode and chunk", 1, False),
        ("draft", 0, False),
        ("padded decode", 1, None),
        ("padded chunk", 1, False),
    ],
)
def test_batch_is_split_into_decoding_and_the_rest(name, decodes, fresh):
    metadata = built(Batch(BATCHES[name]).common())
    assert metadata.decodes == decodes
    assert (metadata.rest.fresh if metadata.rest else None) is fresh


def test_unknown_lengths_are_read_from_the_pages():
    batch = Batch(BATCHES["fresh"])
    metadata = built(batch.common(seq_lens_cpu_upper_bound=None))
    assert not metadata.rest.fresh
    impl = ours.TraplineImpl(H, D, 0.3, G)
    found = served(batch, impl, cache_in(KVCacheLayout.LBHNC), metadata, hidden=True)
    np.testing.assert_allclose(found, batch.expected(scale=0.3), atol=2e-6)


def test_layer_that_shares_a_cache_reads_no_keys_of_its_own():
    batch = Batch(BATCHES["fresh"])
    impl = ours.TraplineImpl(H, D, 0.3, G, kv_sharing_target_layer_name="first")
    cache = cache_in(KVCacheLayout.LBHNC)
    found = served(batch, impl, cache, built(batch.common()), hidden=True)
    np.testing.assert_allclose(found, batch.expected(scale=0.3), atol=2e-6)


def test_memory_profiling_gives_zeros():
    output = torch.ones(3, H, D)
    impl = ours.TraplineImpl(H, D, 0.3, G)
    assert not impl.forward(None, output, output, output, None, None, output).any()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"alibi_slopes": [0.5] * H}, "ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "a cache of fp8"),
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"head_size": 576}, "heads 576 wide"),
        ({"sinks": torch.zeros(H)}, "sinks"),
        ({"use_alibi_sqrt": True}, "use_alibi_sqrt"),
    ],
)
def test_unsupported_layer_is_refused_by_name(given, named):
    plain = {"num_heads": H, "head_size": D, "scale": 0.3, "num_kv_heads": G, "sinks": None}
    ours.TraplineImpl(**plain)
    with pytest.raises(UnsupportedError, match=named):
        ours.TraplineImpl(**{**plain, **given})


def test_unsupported_batch_output_and_cache_are_refused():
    batch, impl = Batch(BATCHES["decode"]), ours.TraplineImpl(H, D, 0.3, G)
    with pytest.raises(UnsupportedError, match="causal"):
        built(batch.common(causal=False))
    x = torch.zeros(3, H, D)
    with pytest.raises(UnsupportedError, match="quantise"):
        impl.forward(None, x, x, x, None, None, x, output_scale=torch.ones(1))
    with pytest.raises(ShapeError, match="keys beside values"):
        impl.forward(None, x, x, x, torch.zeros(2, 4, G, P, D), built(batch.common()), x)


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        ({}, []),
        ({"has_sliding_window": True}, []),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"has_sink": True}, ["attention sinks not supported"]),
        ({"head_size": 320}, ["head_size not supported"]),
        ({"block_size": 8}, ["block_size not supported"]),
        ({"use_non_causal": True}, ["non-causal attention not supported"]),
        ({"device_capability": DeviceCapability(7, 5)}, ["compute capability not supported"]),
        ({"kv_cache_dtype": "float16"}, [f"a cache of float16 for {BF16} is not supported"]),
    ],
)
def test_vllm_is_told_what_is_not_supported(given, reasons):
    plain = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    plain |= {"use_mla": False, "has_sink": False, "use_sparse": False, "use_mm_prefix": False}
    plain |= {"use_per_head_quant_scales": False, "attn_type": "decoder"}
    plain |= {"device_capability": DeviceCapability(9, 0)}
    assert ours.TraplineBackend.validate_configuration(**{**plain, **given}) == reasons
