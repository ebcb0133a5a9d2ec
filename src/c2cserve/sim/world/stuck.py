"""The invariant that every request ends."""


class Stuck(AssertionError):
    """Requests are left, and no event will ever end them."""
