"""The GPU track: CUDA and Triton answers, judged outside their process."""
