"""Dense attention for Hopper GPUs, in Gluon."""
