"""The server: its command, what speaks against it, and its start."""
