"""A transparent proxy that, between a user's turns, has the server compute what the next turn starts with."""
