"""Packed ternary products in Triton, for any CUDA GPU."""
