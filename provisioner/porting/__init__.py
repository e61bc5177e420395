"""Carrying a patch to another build. Pure but for the calls of git."""
