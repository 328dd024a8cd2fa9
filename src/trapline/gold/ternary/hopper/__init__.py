"""Packed ternary products for Hopper GPUs."""
