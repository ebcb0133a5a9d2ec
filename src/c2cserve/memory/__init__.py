"""The host weight pool: segments, loading, budget."""
