"""Real processes: the controller's loop beside the HTTP server, workers on channels."""
