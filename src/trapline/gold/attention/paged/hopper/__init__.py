"""Paged decoding for Hopper GPUs, in Gluon."""
