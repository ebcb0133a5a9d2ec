"""The commands: options and output. With `serving` they join policies and mechanisms."""
