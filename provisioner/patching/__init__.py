"""The patch engine: parse, match, judge, plan, write."""
