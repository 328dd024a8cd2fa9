"""Layer norm, and RMS norm with a residual. The derivation: docs/components/layer_norm.md."""
