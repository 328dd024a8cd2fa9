"""Registers the Triton kernels as the CUDA side of attention's operators."""

from trapline.gold.attention import fast, kernels_bwd, kernels_fwd

KERNELS = "trapline_attention_kernels"

_LIBRARY = fast.register(
    KERNELS,
    {
        "forward": kernels_fwd.forward,
        "backward": kernels_bwd.backward,
        "varlen_forward": kernels_fwd.varlen_forward,
        "varlen_backward": kernels_bwd.varlen_backward,
    },
    "CUDA",
)
