"""Operators that say what they drew when the test says so, as a GPU does: the next step can read it
before anybody knows it."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from c2cserve.engine.gpu.sampling import is_plain
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.ops import Drawn, RowSampling


class LateDraw:
    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self.chain: Tensor | None = torch.tensor(drawn.ids, dtype=torch.int32)
        self.done = False
        self.awaited = False
        self.fault: Exception | None = None

    def collect(self) -> Drawn:
        self.awaited |= not self.done
        self.done = True
        if self.fault is not None:
            raise self.fault
        return self._drawn


class LateOps(CpuOps):
    """Computes at once, on one thread. The rows that a GPU draws itself are chained."""

    def __init__(self) -> None:
        super().__init__(1)
        self.draws: deque[LateDraw] = deque()
        """Those that are not done, oldest first."""
        self.awaited = 0
        """Draws that somebody waited for before they were done."""

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> LateDraw:
        draw = LateDraw(super().sample(logits, rows))
        self.draws.append(draw)
        return draw

    def chains(self, row: RowSampling) -> bool:
        return is_plain(row)

    def finish(self, count: int = 1) -> None:
        """The oldest draws are done."""
        while self.draws and (count or self.draws[0].done):
            draw = self.draws.popleft()
            self.awaited += draw.awaited
            count -= not draw.done
            draw.done = True
