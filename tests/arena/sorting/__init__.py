"""A ninth challenge, the arena's own: small enough to test the arena with."""
