"""A filesystem of the pool's own that is full for some seconds."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

_AGAIN_S = 0.05
"""What others free meanwhile is taken as well."""


class Filler:
    def __init__(self, root: Path) -> None:
        """`root`: where the filesystem is mounted. It must be of this run alone."""
        self._file = root / "filler"

    async def fill(self, seconds: float) -> None:
        """Take all that is free, and what becomes free, for so long; then give it back."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        await self.fill_until(lambda: loop.time() >= until_s)

    async def fill_until(self, done: Callable[[], bool]) -> None:
        """As `fill`, until it is done."""
        file = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not done():
                await asyncio.to_thread(self._take, file)
                await asyncio.sleep(_AGAIN_S)
        finally:
            os.close(file)
            self._file.unlink()

    @staticmethod
    def _take(file: int) -> None:
        """In smaller and smaller parts, as others take some at the same time."""
        found = os.fstatvfs(file)
        part = found.f_bavail * found.f_frsize
        while part >= found.f_frsize:
            with contextlib.suppress(OSError):
                os.posix_fallocate(file, os.fstat(file).st_size, part)
                continue
            part //= 2
