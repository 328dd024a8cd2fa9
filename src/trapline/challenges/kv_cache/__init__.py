"""The KV-cache challenge: dense, paged and quantised caches, chunked prefill, maximal context."""
