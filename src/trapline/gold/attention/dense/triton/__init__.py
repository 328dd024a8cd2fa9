"""Dense attention in plain Triton."""
