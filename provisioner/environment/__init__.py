"""The virtual environment: its lock, uv, and what is installed in it."""
