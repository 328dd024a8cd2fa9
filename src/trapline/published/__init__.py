"""The published field: figures of an earlier, hand-written comparison, as data."""
