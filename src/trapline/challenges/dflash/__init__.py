"""DFlash: speculative decoding with draft trees, from building to generating."""
