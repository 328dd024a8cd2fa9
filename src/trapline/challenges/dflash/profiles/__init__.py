"""Other prompts of this challenge."""
