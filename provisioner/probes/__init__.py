"""Measurements against a live server of the OpenAI kind: what was asked, what was counted, how two runs compare."""
