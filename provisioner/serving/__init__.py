"""Launching, diagnosing and measuring a server."""
