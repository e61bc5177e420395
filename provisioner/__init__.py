"""Turns a recipe into a proven vLLM environment, and tells which patches still hold on tomorrow's build."""

__version__ = "0.1.0"
