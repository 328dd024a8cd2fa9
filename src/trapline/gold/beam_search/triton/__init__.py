"""The Triton kernel of a search step."""
