"""An OpenAI-compatible HTTP server over `Engine`."""
