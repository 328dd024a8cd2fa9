"""Other prompts of this challenge on the GPU."""
