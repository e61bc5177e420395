"""Changing files below an environment: all of it or none, whatever fails in between."""
