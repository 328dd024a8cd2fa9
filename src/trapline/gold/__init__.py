"""The gold implementations: eight LLM systems, each with a float64 oracle and a fast path."""
