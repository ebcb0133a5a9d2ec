"""Every decision. Standard library and core only: no torch, no clock, no I/O, no logging."""
