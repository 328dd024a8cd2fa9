"""Train a language model whose every weight is −1, 0 or 1 times a group's scale."""
