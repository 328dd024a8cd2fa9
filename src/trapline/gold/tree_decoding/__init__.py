"""Speculative decoding with draft trees: building, masking, verifying, committing."""
