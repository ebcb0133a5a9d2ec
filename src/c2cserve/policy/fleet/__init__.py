"""The policy of many nodes: where models are, where requests go."""
