"""The live world: the controller beside the HTTP server, and workers on channels."""
