"""The patched build as one wheel: what is in it, made, and proven."""
