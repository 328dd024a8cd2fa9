"""Kernels that use Hopper's copy engine."""
