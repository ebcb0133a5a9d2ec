"""The commands; the only modules that join policies and mechanisms."""
