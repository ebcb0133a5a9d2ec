"""Running a batch of a model on a slice."""
