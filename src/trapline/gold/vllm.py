"""The paged kernels as an attention backend of vLLM: `vllm serve MODEL --attention-backend CUSTOM`.

vLLM finds `register` by the entry point `vllm.general_plugins`. Its cache of a layer is
(blocks, G, positions, 2 · D), a key beside its value, in whatever order of memory vLLM chooses.
Keys and values are views of it, which `paged_attention` and `paged_append` take without a copy.

A batch is served in two parts. Sequences with one query come first, as vLLM orders them, and are
one decoding call. The others are one call of `flash_attention_varlen` if all of them begin in this
batch, and one call of `paged_attention` if some have positions in the cache already.

ALiBi, attention sinks, quantised caches, fused quantisation of the output, MLA and everything but
causal decoder attention are refused. vLLM on CPUs always runs its own backend.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trapline.gold.attention.api import flash_attention_varlen
from trapline.gold.attention.paged.api import paged_append, paged_attention
from trapline.gold.errors import ShapeError, UnsupportedError

try:
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionImpl,
        AttentionLayer,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
        MultipleOf,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
except ImportError as error:
    raise ImportError(
        f"this backend needs vLLM 0.33: pip install 'trapline[vllm]' (the import says: {error})"
    ) from error

MAX_WIDTH = 256
_CACHES = {"auto", "float16", "bfloat16"}


def register() -> None:
    """Register the backend as vLLM's CUSTOM. May be called again, as vLLM does in each process."""
    path = f"{TraplineBackend.__module__}.{TraplineBackend.__qualname__}"
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != path:
        warnings.warn(
            f"vLLM's CUSTOM attention backend is {custom.get_path()} and stays so; to use "
            "Trapline's, exclude the other plug-in by the variable VLLM_PLUGINS",
            stacklevel=2,
        )
        return
    register_backend(custom, path)


@dataclass
class PrefillRows:
    """The sequences after the decoding ones, which have any number of queries."""

    first: int  # their first token in the batch
    cu_q: Tensor  # boundaries of their queries, from 0
    max_q: int
    seq_lens: Tensor
    block_table: Tensor
    fresh: bool  # whether none of them has positions in the cache from earlier batches


@dataclass
class TraplineMetadata(AttentionMetadata):
    """One batch: `decodes` sequences with one query each, then the others."""

    tokens: int
    decodes: int
    seq_lens: Tensor  # of the decoding sequences
    block_table: Tensor
    rest: PrefillRows | None


class TraplineMetadataBuilder(AttentionMetadataBuilder[TraplineMetadata]):
    """Splits a batch by the boundaries that vLLM keeps on the host; nothing waits for a device."""

    reorder_batch_threshold = 1  # sequences with one query come first

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002 - always 0, says vLLM
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002 - there is one way to build
    ) -> TraplineMetadata:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise UnsupportedError(
                "Trapline's vLLM backend computes causal attention only, and this batch asks for "
                "other masks; choose another --attention-backend"
            )
        count = batch.num_reqs
        ends = batch.query_start_loc_cpu[: count + 1]
        queries = ends.diff()
        decodes = int((queries == 1).long().cumprod(0).sum())
        tokens = int(ends[-1])
        rest = None
        if tokens > decodes:
            known = batch.seq_lens_cpu_upper_bound
            # A length is at least the number of queries, so a bound that equals it is exact.
            fresh = known is not None and torch.equal(
                known[decodes:count].long(), queries[decodes:].long()
            )
            rest = PrefillRows(
                first=decodes,
                cu_q=batch.query_start_loc[decodes : count + 1] - decodes,
                max_q=int(queries[decodes:].max()),
                seq_lens=batch.seq_lens[decodes:count],
                block_table=batch.block_table_tensor[decodes:count],
                fresh=fresh,
            )
        lengths, table = batch.seq_lens[:decodes], batch.block_table_tensor[:decodes]
        return TraplineMetadata(tokens, decodes, lengths, table, rest)


class TraplineImpl(AttentionImpl[TraplineMetadata]):
    """One layer's attention. vLLM writes the cache by `do_kv_cache_update` before `forward`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **features: Any,
    ) -> None:
        asked = {"ALiBi": alibi_slopes is not None}
        asked[f"a cache of {kv_cache_dtype}"] = kv_cache_dtype not in _CACHES
        asked[f"attention of type {attn_type}"] = attn_type != AttentionType.DECODER
        asked[f"heads {head_size} wide (1 to {MAX_WIDTH} are)"] = not 1 <= head_size <= MAX_WIDTH
        asked |= {name: not _is_off(value) for name, value in features.items()}
        refused = [name for name, wanted in asked.items() if wanted]
        if refused:
            raise UnsupportedError(
                f"Trapline's vLLM backend does not support {', '.join(refused)}; choose another "
                "--attention-backend"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.shares_cache = kv_sharing_target_layer_name is not None
        self.rules: dict[str, Any] = {"window": sliding_window, "scale": self.scale}
        self.rules["softcap"] = logits_soft_cap or 0.0

    def forward(
        self,
        layer: AttentionLayer,  # noqa: ARG002 - holds scales of quantised caches
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TraplineMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of the batch to `output`, (tokens, H, D); rows after it stay."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError(
                "Trapline's vLLM backend does not quantise its output; turn the fusion of "
                "attention and quantisation off (fuse_attn_quant)"
            )
        if attn_metadata is None:  # vLLM measures its memory
            return output.zero_()
        batch, decodes, pages = attn_metadata, attn_metadata.decodes, self._pages(kv_cache)
        if decodes:
            paged_attention(
                query[:decodes],
                *(*pages, batch.block_table, batch.seq_lens),
                out=output[:decodes],
                **self.rules,
            )
        rest = batch.rest
        if rest is None:
            return output
        rows = slice(rest.first, batch.tokens)
        if rest.fresh and key is not None and not self.shares_cache:
            ends = rest.cu_q, rest.cu_q, rest.max_q, rest.max_q
            output[rows] = flash_attention_varlen(
                query[rows], key[rows], value[rows], *ends, causal=True, **self.rules
            )
        else:
            paged_attention(
                query[rows],
                *(*pages, rest.block_table, rest.seq_lens),
                cu_q=rest.cu_q,
                max_q=rest.max_q,
                out=output[rows],
                **self.rules,
            )
        return output

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,  # noqa: ARG002 - holds scales of quantised caches
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write keys and values to their slots; vLLM pads `key` and `value` beyond the slots."""
        tokens = len(slot_mapping)
        paged_append(key[:tokens], value[:tokens], *self._pages(kv_cache), slot_mapping)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the keys and the values, (blocks, G, positions, D) each."""
        shape = tuple(kv_cache.shape)
        if len(shape) != 4 or (shape[1], shape[3]) != (self.num_kv_heads, 2 * self.head_size):
            raise ShapeError(
                f"the cache of a layer must be (blocks, {self.num_kv_heads}, positions, "
                f"{2 * self.head_size}), keys beside values, got {shape}"
            )
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]


class TraplineBackend(AttentionBackend):
    """What vLLM asks before it chooses the backend; it reports a refusal with its reason."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up among its own

    @staticmethod
    def get_impl_cls() -> type[TraplineImpl]:
        return TraplineImpl

    @staticmethod
    def get_builder_cls() -> type[TraplineMetadataBuilder]:
        return TraplineMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: Any = None,  # noqa: ARG004 - the same for all caches
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= MAX_WIDTH

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a batch is split by the host's boundaries

    @classmethod
    def supports_combination(
        cls,
        head_size: int,  # noqa: ARG003
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,  # noqa: ARG003
        use_mla: bool,  # noqa: ARG003
        has_sink: bool,  # noqa: ARG003
        use_sparse: bool,  # noqa: ARG003
        use_mm_prefix: bool,  # noqa: ARG003
        device_capability: Any,  # noqa: ARG003
    ) -> str | None:
        """Pages have the dtype of the queries."""
        if kv_cache_dtype in (None, "auto") or f"torch.{kv_cache_dtype}" == str(dtype):
            return None
        return f"a cache of {kv_cache_dtype} for a model of {dtype} is not supported"


def _is_off(value: Any) -> bool:
    """Whether a further argument of a layer asks for nothing: None, False, 0 or −1."""
    return value is None or (isinstance(value, int) and value in (0, -1))
