"""The host pool: which models are in it, and whose turn it is."""
