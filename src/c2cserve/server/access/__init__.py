"""API keys and tenants: identity, limits and usage of each key."""
