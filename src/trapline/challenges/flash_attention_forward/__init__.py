"""Flash attention, forward: tiled, exact, O(N) memory."""
