"""Launches of the dataflows: operands checked, parameters packed, kernels and copies started."""
