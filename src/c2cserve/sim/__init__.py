"""Simulations: the server's own loops in virtual time, against measured and published costs.

No request of a server comes here. `simulate`, `plan`, `calibrate` and `doctor` use it."""
