"""A front of a cluster: the HTTP server of one machine, with nodes instead of slices behind it."""
