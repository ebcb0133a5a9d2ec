"""The policies of a simulation: the server's own, or what a preset composes."""
