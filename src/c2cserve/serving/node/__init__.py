"""A node of a cluster: the server of one machine, with fronts instead of clients before it."""
