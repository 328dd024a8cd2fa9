"""Softmax fused with top-k. The derivation: docs/components/softmax_topk.md."""
