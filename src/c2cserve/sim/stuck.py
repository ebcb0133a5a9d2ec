"""The invariant that every request ends. (mypyc compiles no kind of AssertionError.)"""


class Stuck(AssertionError):
    """Requests are left, and no event will ever end them."""
