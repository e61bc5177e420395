"""``provision drift`` and ``provision drift-issue``."""
