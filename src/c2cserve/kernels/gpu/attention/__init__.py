"""Attention over the paged KV arena, in Triton and by FlashInfer."""
