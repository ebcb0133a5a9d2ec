"""Architectures: configuration, layout in the pool, rotary tables, the decoder."""
