"""Flash attention, backward: gradients from out and log-sum-exp, tile by tile."""
