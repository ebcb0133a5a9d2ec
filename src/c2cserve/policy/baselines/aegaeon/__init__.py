"""Aegaeon, as far as one slice can be it: turns of models at the granularity of tokens."""
