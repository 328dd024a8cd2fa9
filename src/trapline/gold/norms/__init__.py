"""Layer norm, and RMS norm with a residual. The derivation: docs/components/layer_norm.md."""

#: Elements per thread up to which torch's RMS norm is faster on a CPU, without and with gradients.
TORCH_MOST, TORCH_MOST_RECORDED = 1 << 17, 1 << 16
