"""The published prompt: one cycle of verification, judged by greedy equality."""
