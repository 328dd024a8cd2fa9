"""Packed ternary products in C."""
