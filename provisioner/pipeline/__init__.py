"""Bringing a series of patches to an environment, and saying what an environment is."""
