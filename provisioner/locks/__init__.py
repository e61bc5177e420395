"""Making, finding and using locks, and the wheel that a lock names."""
