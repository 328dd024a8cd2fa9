"""Reports of a run: a static site, Markdown, tables, and the same site live."""
