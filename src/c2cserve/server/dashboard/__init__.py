"""The dashboard: a page, and the state that it shows as a stream of events."""
