"""The published prompt for a fused CUDA kernel."""
