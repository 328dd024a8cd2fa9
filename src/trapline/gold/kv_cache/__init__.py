"""Keys and values of past tokens: stored, shared, quantised, attended to, and counted in bytes."""
