"""Tools and forms of outputs: their fields; reading calls and reasoning out of an output."""
