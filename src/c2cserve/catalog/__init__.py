"""The catalogue file, and finding a model's files on disk or on a hub."""
