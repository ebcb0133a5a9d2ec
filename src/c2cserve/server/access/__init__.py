"""API keys and tenants: who asks, what a key may ask for, and what it has used."""
