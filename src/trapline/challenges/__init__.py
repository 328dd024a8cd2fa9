"""The eight challenges, one folder each: data, and the only code that touches both halves."""
