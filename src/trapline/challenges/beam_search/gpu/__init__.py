"""The GPU track of beam_search."""
