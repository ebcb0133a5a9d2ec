"""GPU slices."""
