"""The dataflows: a module each, and `table`, which lists them."""
