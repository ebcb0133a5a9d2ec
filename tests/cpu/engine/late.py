"""Operators whose samples are done when the test says so. As on a GPU, the next step can read the
tokens before the host knows them."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from c2cserve.engine.gpu.sampling import is_plain
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.ops import AwaitedMasks, RowSampling, SampledTokens


class LateSample:
    def __init__(self, tokens: SampledTokens) -> None:
        self._tokens = tokens
        self.chain: Tensor | None = torch.tensor(tokens.ids, dtype=torch.int32)
        self.done = False
        self.awaited = False
        self.fault: Exception | None = None

    def collect(self) -> SampledTokens:
        self.awaited |= not self.done
        self.done = True
        if self.fault is not None:
            raise self.fault
        return self._tokens


def _masked(rows: Sequence[RowSampling], awaited: AwaitedMasks) -> list[RowSampling]:
    """Wait for masks as a stream does: the thread that would see to it may be this one."""
    while not int(awaited.words[0]):
        time.sleep(0.001)
    places = awaited.words[awaited.places_at :][: len(rows)].tolist()
    masks = awaited.words[awaited.masks_at :][: awaited.count * awaited.width].clone()
    whole = masks.view(awaited.count, awaited.width)
    return [
        replace(row, mask=whole[place]) if place >= 0 else row
        for row, place in zip(rows, places, strict=True)
    ]


class LateOps(CpuOps):
    """Computes at once, on one thread. The rows that a GPU samples itself are chained."""

    def __init__(self) -> None:
        super().__init__(1)
        self.samples: deque[LateSample] = deque()
        """Those that are not done, oldest first."""
        self.awaited = 0
        """Samples that were collected before they were done."""

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], awaited: AwaitedMasks | None = None
    ) -> LateSample:
        if awaited is not None:
            rows = _masked(rows, awaited)
        sample = LateSample(super().sample(logits, rows))
        self.samples.append(sample)
        return sample

    def chains(self, row: RowSampling) -> bool:
        return is_plain(row)

    def finish(self, count: int = 1) -> None:
        """Have the `count` oldest samples done."""
        while self.samples and (count or self.samples[0].done):
            sample = self.samples.popleft()
            self.awaited += sample.awaited
            count -= not sample.done
            sample.done = True
