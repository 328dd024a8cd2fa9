"""The GPU track of dflash."""
