"""Tools: their fields, and reading calls and reasoning out of a model's output."""
