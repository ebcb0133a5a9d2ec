"""Reading checkpoint files, which may be hostile, and noticing when they change."""
