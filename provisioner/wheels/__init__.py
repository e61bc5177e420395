"""Finding and reading wheels."""
