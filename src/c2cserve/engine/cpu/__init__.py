"""CPU slices."""
