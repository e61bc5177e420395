"""The card: what it is, whether it is healthy, and whether its kernels tell the truth."""
