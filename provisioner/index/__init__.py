"""Whom to ask for wheels, and any member of a wheel without the wheel."""
