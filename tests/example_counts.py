"""How many examples the random tests draw: a third in the fast tests, all of them with
`C2CSERVE_TEST_EXAMPLES=all`. Of cases that cost much each, the fast tests have few."""

import os

_ALL = os.environ.get("C2CSERVE_TEST_EXAMPLES") == "all"


def examples(count: int) -> int:
    """Return how many of so many examples are drawn now, at least 20 where there are more."""
    return count if _ALL or count <= 20 else max(20, count // 3)


def few(count: int, fast: int) -> int:
    """Return how many of so many costly cases there are now: `fast` in the fast tests."""
    return count if _ALL else fast
