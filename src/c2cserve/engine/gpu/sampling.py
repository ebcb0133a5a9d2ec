"""Drawing tokens of a GPU slice.

Plain greedy rows are decided on the GPU, and two numbers of each are read back. All others go to
the CPU's sampler, which knows every parameter and draws the same token for the same (seed,
position) wherever it runs; their logits are copied whole.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from c2cserve.kernels.gpu.greedy import greedy, greedy_of
from c2cserve.kernels.ops import Drawn, RowSampling

HostSampler = Callable[[Tensor, Sequence[RowSampling]], Drawn]
"""`Ops.sample` of the CPU: float32 logits on the host."""


def is_plain(row: RowSampling) -> bool:
    """Greedy, over logits as they are, of which only the chosen one's log-probability is wanted."""
    return (
        row.temperature <= 0.0
        and row.top_logprobs <= 0
        and row.repetition == 1.0
        and row.presence == row.frequency == 0.0
        and row.bias_ids is row.banned is None
    )


class Sampler:
    """One per slice: it belongs to the slice's thread."""

    def __init__(self, host: HostSampler) -> None:
        self._host = host

    def __call__(self, logits: Tensor, rows: Sequence[RowSampling]) -> Drawn:
        """A token per row of logits [R, V]. The step is over when this returns."""
        others = [i for i, row in enumerate(rows) if not is_plain(row)]
        if not rows:
            _finish(logits.device)
            return Drawn([], [])
        if len(others) == len(rows):
            return self._host(_on_host(logits), rows)
        ids, logprobs = greedy_of(greedy(logits).cpu())
        if not others:
            return Drawn(ids, logprobs)
        drawn = self._host(_on_host(logits[others]), [rows[i] for i in others])
        top: list[list[tuple[int, float]]] = [[] for _ in rows]
        for at, i in enumerate(others):
            ids[i], logprobs[i] = drawn.ids[at], drawn.logprobs[at]
            top[i] = drawn.top[at] if drawn.top else []
        return Drawn(ids, logprobs, top)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _on_host(logits: Tensor) -> Tensor:
    """Copied as they are, at the link's speed, and widened there."""
    if logits.device.type != "cuda":
        return logits.float()
    host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    return host.copy_(logits).float()
