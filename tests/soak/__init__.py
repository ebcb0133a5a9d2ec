"""A real server under a seeded stream of requests, faults and catalogue changes; every answer is
judged. `scripts/soak --help`; how to read what it says: docs/soak.md."""
