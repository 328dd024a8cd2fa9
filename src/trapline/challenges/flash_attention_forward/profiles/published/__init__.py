"""The published prompt: tiled attention, its output alone."""
