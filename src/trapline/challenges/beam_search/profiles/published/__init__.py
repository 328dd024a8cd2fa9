"""The published prompt: finished and live beams share the places."""
