"""Shows that the judge works: mutants, controls, the red team, the kill matrix."""
