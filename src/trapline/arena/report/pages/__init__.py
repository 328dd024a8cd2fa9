"""One module per kind of page: its content. The templates hold its layout."""
