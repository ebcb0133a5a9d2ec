"""The fast loop: the slice policy, batching, step times, KV arena, KV rotation."""
