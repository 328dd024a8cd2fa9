"""One module a kind of page: what stands on it. How it looks is in the templates."""
