"""``provision patch`` and ``provision patches``."""
