"""Tokens sampled on the GPU."""
