"""Launches of the dataflows: they check operands, pack parameters, and start kernels and copies."""
