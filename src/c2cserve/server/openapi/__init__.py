"""The description of the HTTP API at /openapi.json."""
