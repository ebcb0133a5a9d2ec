"""How commands fail, and how they show sizes, times, tables and JSON."""
