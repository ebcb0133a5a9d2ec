"""A GPU that is late, and FlashInfer's wrapper on it: what is planned or run is done when somebody
waits for it, from the memory it was given, whatever that holds by then."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from c2cserve.kernels.layer import BLOCK_TOKENS


class LateGpu:
    """Work in its order."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.done = 0
        self.plans: list[dict[str, Any]] = []
        """What wrappers were planned with besides arrays."""

    def catch_up(self, until: int | None = None) -> None:
        for work in self.waiting[self.done : until]:
            work()
        self.done = max(self.done, len(self.waiting) if until is None else until)

    def event(self) -> "LateEvent":
        return LateEvent(self)

    def wrapper(self) -> "Wrapper":
        return Wrapper(self)


class LateEvent:
    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._until = 0

    def record(self) -> None:
        self._until = len(self._gpu.waiting)

    def synchronize(self) -> None:
        self._gpu.catch_up(self._until)


class Wrapper:
    """As much of `BatchPrefillWithPagedKVCacheWrapper` as is used, by the definition."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self._there: list[list[int]] = []
        self._asked: dict[str, Any] = {}

    def plan(
        self, q_starts: Tensor, page_starts: Tensor, numbers: Tensor, last_tokens: Tensor,
        heads: int, kv_heads: int, head_dim: int, page_tokens: int, *, seq_lens: Tensor,
        **asked: Any,
    ) -> None:  # fmt: skip
        arrays = (q_starts, page_starts, numbers, last_tokens, seq_lens)
        assert all(array.dtype == torch.int32 for array in arrays)
        assert (page_tokens, asked["causal"]) == (BLOCK_TOKENS, True)
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        self._gpu.plans.append(asked | shape)
        self._asked = asked

        def copy() -> None:
            self._there = [array.tolist() for array in arrays]

        self._gpu.waiting.append(copy)

    def run(
        self, q: Tensor, cache: tuple[Tensor, Tensor], *, out: Tensor, enable_pdl: bool
    ) -> None:
        assert not enable_pdl
        assert cache[0].stride() == cache[1].stride()
        asked = self._asked

        def compute() -> None:
            q_starts, page_starts, numbers, last_tokens, lengths = self._there
            assert q_starts[-1] == len(q)
            for s, length in enumerate(lengths):
                mine = numbers[page_starts[s] : page_starts[s + 1]]
                assert (len(mine) - 1) * BLOCK_TOKENS + last_tokens[s] == length
                rows = slice(q_starts[s], q_starts[s + 1])
                keys, values = (pages[mine].movedim(1, 2).flatten(0, 1) for pages in cache)
                out[rows] = _attention(
                    q[rows], keys[:length], values[:length], asked["sm_scale"],
                    asked["window_left"],
                )  # fmt: skip

        self._gpu.waiting.append(compute)


def _attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, left: int) -> Tensor:
    """q [n, Hq, D] of the last of the tokens of keys and values [N, Hkv, D]."""
    group = q.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    at = torch.arange(len(keys))
    back = at[len(keys) - len(q) :, None] - at
    hidden = (back < 0) | ((back > left) if left >= 0 else False)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
