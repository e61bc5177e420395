"""The patch engine: parse, match, judge, plan. Pure."""
