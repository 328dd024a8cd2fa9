"""The GPU track of flash_attention_backward."""
