"""``provision probe``."""
