"""Ternary weights: quantise, pack, export, and train with them."""
