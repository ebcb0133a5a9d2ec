"""An event loop that is late in each of its turns, as a busy server's is."""

import asyncio
import time


class LateLoop:
    """Makes each turn of the running event loop take `turn_s` more, until the end of the block."""

    def __init__(self, turn_s: float) -> None:
        self.turns = 0
        self._turn_s = turn_s

    async def __aenter__(self) -> "LateLoop":
        self._task = asyncio.create_task(self._be_late())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _be_late(self) -> None:
        while True:
            time.sleep(self._turn_s)
            self.turns += 1
            await asyncio.sleep(0)
