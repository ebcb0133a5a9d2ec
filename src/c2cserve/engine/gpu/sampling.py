"""Sampling tokens on a GPU slice.

    plain rows    greedy or sampled on the GPU     two numbers a row to pinned memory
    other rows    sampled by the CPU's sampler     all of their logits to pinned memory

The next step may read the ids of plain rows on the GPU. The CPU's sampler knows every parameter.
Both use the same random stream, a function of (seed, position). Only `collect` waits. What comes to
the host is written by a kernel if it is small: a copy engine may have KV queued that goes out.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from c2cserve.kernels.gpu.sampling.greedy import greedy, greedy_of
from c2cserve.kernels.gpu.sampling.masks import RowMasks
from c2cserve.kernels.gpu.sampling.sample import asked_of, sample
from c2cserve.kernels.gpu.small_copies import copy_small, copy_small_out
from c2cserve.kernels.ops import AwaitedMasks, RowSampling, Sample, SampledTokens

HostSampler = Callable[[Tensor, Sequence[RowSampling]], Sample]
"""`Ops.sample` of the CPU: float32 logits on the host."""

OnStepEnd = Callable[[torch.cuda.Event], None]
"""Receives the event at a step's end."""


def is_plain(row: RowSampling) -> bool:
    """Return whether a row samples from its logits as they are, or from those that its mask leaves.
    It wants the log-probability of the chosen token alone."""
    return (
        row.top_logprobs <= 0
        and row.repetition == 1.0
        and row.presence == row.frequency == 0.0
        and row.bias_ids is row.banned is None
    )


_GREEDY = RowSampling(seed=0, position=0, temperature=0.0)
_WORD = 4
"""Bytes of what kernels copy."""


class GpuSample:
    """The `kernels.ops.Sample` of a step that is on its way through the current stream."""

    def __init__(
        self, host: HostSampler, logits: Tensor, rows: Sequence[RowSampling],
        awaited: AwaitedMasks | None = None,
    ) -> None:  # fmt: skip
        """Launch the sampling of a token per row of logits [R, V]. See `Ops.sample`."""
        self._sampler = host
        self._rows = rows
        self._others = [i for i, row in enumerate(rows) if not is_plain(row)]
        self._found: Tensor | None = None
        self._read: tuple[Tensor | None, ...] = ()
        if len(self._others) < len(rows):
            found, self._read = _decide(logits, rows, self._others, awaited)
            self.chain: Tensor | None = found[0]
            self._found = _to_host(found)
        else:
            self.chain = None
        # Without a plain row, all rows are wanted and none is gathered.
        picked = logits if self._found is None else logits[self._others]
        self._logits = _to_host(picked) if self._others else None
        self.end: torch.cuda.Event | None = None
        """Recorded after all of the step; None where nothing runs by itself."""
        if logits.device.type == "cuda":
            self.end = torch.cuda.Event(blocking=True)
            self.end.record()

    @property
    def done(self) -> bool:
        return self.end is None or self.end.query()

    @property
    def pinned(self) -> tuple[Tensor | None, ...]:
        """Memory that kernels of the step read or write. It must not be freed before its end."""
        return *self._read, self._found, self._logits

    def collect(self) -> SampledTokens:
        if self.end is not None:
            self.end.synchronize()
        if self._found is None and self._logits is None:
            return SampledTokens([], [])
        if self._logits is None:
            assert self._found is not None
            return SampledTokens(*greedy_of(self._found))
        others = [self._rows[i] for i in self._others]
        sampled = self._sampler(self._logits.float(), others).collect()
        return sampled if self._found is None else self._merged(*greedy_of(self._found), sampled)

    def _merged(
        self, ids: list[int], logprobs: list[float], others: SampledTokens
    ) -> SampledTokens:
        top: list[list[tuple[int, float]]] = [[] for _ in ids]
        for at, i in enumerate(self._others):
            ids[i], logprobs[i] = others.ids[at], others.logprobs[at]
            top[i] = others.top[at] if others.top else []
        return SampledTokens(ids, logprobs, top)


class Sampler:
    """The sampler of one slice. It belongs to the slice's thread."""

    def __init__(self, host: HostSampler, on_step_end: OnStepEnd | None = None) -> None:
        self._host = host
        self._on_step_end = on_step_end
        self._in_use: deque[tuple[torch.cuda.Event, tuple[Tensor | None, ...]]] = deque()
        """Pinned memory of steps that may not be over, whether their samples are still wanted."""

    def __call__(
        self, logits: Tensor, rows: Sequence[RowSampling], awaited: AwaitedMasks | None = None
    ) -> GpuSample:
        """Launch the sampling of a token per row of logits [R, V], which ends a step."""
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()
        sample = GpuSample(self._host, logits, rows, awaited)
        if sample.end is not None:
            self._in_use.append((sample.end, sample.pinned))
            if self._on_step_end is not None:
                self._on_step_end(sample.end)
        return sample


def _decide(
    logits: Tensor, rows: Sequence[RowSampling], others: Sequence[int],
    awaited: AwaitedMasks | None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:  # fmt: skip
    """Return ids and log-probabilities as `greedy` does. Those of `others` have no meaning. Return
    beside them the host's memory that must be kept until they are there."""
    elsewhere = set(others)
    if awaited is None:
        masks = [None if i in elsewhere else row.mask for i, row in enumerate(rows)]
        only = RowMasks.of(masks, logits.device)
    else:
        only = RowMasks.when_ready(awaited, len(rows), logits.device)
    read = () if only is None else (only.read,)
    if all(row.temperature <= 0.0 for row in rows if is_plain(row)):
        return greedy(logits, only), read
    asked = asked_of([_GREEDY if i in elsewhere else row for i, row in enumerate(rows)])
    pinned = asked.pin_memory() if logits.device.type == "cuda" else asked
    moved = torch.empty_like(pinned, device=logits.device)
    copy_small(pinned.view(-1).view(torch.int32), moved.view(-1).view(torch.int32))
    return sample(logits, moved, only), (pinned, *read)


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a contiguous tensor as it is. It may be read once the step is over."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    begins = tensor.storage_offset() * tensor.itemsize
    if tensor.nbytes % _WORD or begins % _WORD or not tensor.is_contiguous():
        return host.copy_(tensor, non_blocking=True)
    copy_small_out(tensor.view(-1).view(torch.int32), host.view(-1).view(torch.int32))
    return host
