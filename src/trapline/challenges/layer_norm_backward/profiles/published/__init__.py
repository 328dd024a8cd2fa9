"""The published prompt: layer norm under free names."""
