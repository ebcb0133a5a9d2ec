"""File descriptors in reserve, for work that must not fail when the process has no others left."""

import contextlib
import os
from collections.abc import Generator


class Reserve:
    """Placeholders in the process's table of descriptors. Used by one thread.

    They are closed while they are lent. Another thread may take them in that moment, for example to
    accept a connection. So the borrower is likely to succeed, and may still fail.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []
        self._fill()

    @contextlib.contextmanager
    def lent(self) -> Generator[None]:
        """Free the reserve's descriptors for use inside the context."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def _fill(self) -> None:
        """Open placeholders as far as descriptors are left. The next loan tries again."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())
