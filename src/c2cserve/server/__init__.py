"""The OpenAI-compatible HTTP server, admin, metrics, tokenizing."""
