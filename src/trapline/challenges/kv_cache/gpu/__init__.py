"""The GPU track of kv_cache."""
