"""The published prompt: a cache is judged by decoding against recomputation."""
