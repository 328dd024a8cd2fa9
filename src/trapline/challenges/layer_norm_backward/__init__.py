"""Layer normalisation: forward, backward with a minimal cache, and a gradient check that scales."""
