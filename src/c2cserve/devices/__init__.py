"""The machine: its CPUs, memory, GPUs, and how they become slices."""
