"""The virtual environment: uv, what is installed in it, and what the tool keeps there."""
