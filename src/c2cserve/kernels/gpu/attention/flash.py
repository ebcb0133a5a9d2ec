"""Attention of prompts by FlashInfer's kernel for Hopper (FlashAttention 3), over our arena.

It computes steps of more rows than our own GEMMs take. The bits of such steps depend on how prompts
are cut in any case. `kernels.gpu.attention.paged` computes the rest: sequences of one new token,
smaller steps, and kinds without a module. Only FlashInfer's public wrapper is used. Its modules
were built ahead, and it must compile nothing.

    step 1   plan A | copy A | layers
    step 2            plan B | copy B waits behind step 1 | layers
    step 3                     plan A again: its copy ended with step 1

A plan says which CTA computes which tile. It is made on the host, once for all layers of a step,
and copied to the GPU in the stream's order. Planning overwrites the wrapper's pinned memory, which
an earlier copy may still have to read. So two wrappers, A and B, are planned alternately, and each
waits until its last copy is over. With two steps in flight, that wait is short. Memory on the GPU
needs no wait: it is overwritten in the stream's order. A parked step that no longer finds its plan
makes it again.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from c2cserve.kernels.gpu.aot.flash_modules import FlashKind
from c2cserve.kernels.gpu.attention.flash_pages import Pages, paged, pages_of
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED
from c2cserve.kernels.gpu.gemm.weight import TORCH_DTYPES
from c2cserve.kernels.layer import BLOCK_TOKENS, Layer, TokenRows

_WRAPPERS = 2
"""Each has 8 MiB of pinned memory and as much on the GPU."""


class Flash:
    """FlashInfer's attention for one slice. It belongs to the slice's thread and stream."""

    def __init__(self, device: torch.device, wrapper: Callable[[], Any] | None) -> None:
        """`wrapper` makes a `BatchPrefillWithPagedKVCacheWrapper` without a plan. If it is None,
        there is no FlashInfer, and every call returns False."""
        self._device = device
        self._new_wrapper = wrapper
        self.kinds: set[FlashKind] = set()
        """The kinds that are computed here."""
        self._wrappers: dict[bool, list[_PlannedWrapper]] = {}
        """The wrappers for layers with and without a window, the last planned one at the end."""
        self.steps = 0
        """Steps of more rows than our GEMMs take, whose prompts were computed here."""
        self.missed = 0
        """Steps of more rows than our GEMMs take, whose kind is not computed here."""

    def ready(self, kind: FlashKind, heads: int, kv_heads: int) -> None:
        """Compute this kind here from now on. Run it once, so that all of it is loaded. Raises what
        FlashInfer does."""
        dtype, dim = TORCH_DTYPES[kind.dtype], kind.head_dim
        ones = np.array([1], np.int32)
        pages = Pages(
            0, 2, 0, 2 * np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32), ones - 1,
            2 * ones, 2 * ones,
        )  # fmt: skip
        wrapper = self._next_wrapper(kind.windowed)
        wrapper.plan(None, int(kind.windowed), pages, heads, kv_heads, dim, dtype, 1.0)
        cache = torch.zeros(2, 1, kv_heads, BLOCK_TOKENS, dim, dtype=dtype, device=self._device)
        q = torch.zeros(2, heads, dim, dtype=dtype, device=self._device)
        wrapper.run(q, cache[0], cache[1], torch.empty_like(q))
        self.kinds.add(kind)

    def renew(self) -> None:
        """Forget plans, which a failed step may have left half made. Nothing runs meanwhile."""
        self._wrappers.clear()

    def __call__(
        self, qkv: Tensor, layer: Layer, rows: TokenRows, arena: Tensor, out: Tensor
    ) -> bool:
        """Compute the attention of the sequences with several new tokens, if it is computed here.

        It is in steps of many rows whose kind is ready. The keys and values are in the arena, and
        the queries in `qkv` [T, (Hq + 2 Hkv) D] are rotated. Their rows of `out` [T, Hq D] are
        written. Return whether this was done. If so, rows of single tokens in `out` are undefined.
        """
        if len(qkv) <= ROWS_STREAMED or rows.host is None:
            return False
        kv = layer.shape.kv
        taken = _kind(layer) in self.kinds
        if layer.index == 0:
            self.steps += taken
            self.missed += not taken
        if not taken:
            return False
        heads = out.shape[1] // kv.head_dim
        wrapper = self._planned(rows.host, layer, heads, qkv.dtype)
        pages = wrapper.pages
        assert pages is not None, "it was planned"
        several, count = slice(pages.begin, pages.end), pages.end - pages.begin
        q = qkv[several].view(count, -1, kv.head_dim)[:, :heads]
        keys, values = paged(arena.view(qkv.dtype), kv, layer.index, pages.unit)
        wrapper.run(q, keys, values, out[several].view(count, heads, kv.head_dim))
        return True

    def _planned(
        self, rows: TokenRows, layer: Layer, heads: int, dtype: torch.dtype
    ) -> "_PlannedWrapper":
        """Return the wrapper that has the step's plan. `rows`: the step's rows on the host."""
        kv, window = layer.shape.kv, layer.weights.window
        for wrapper in self._wrappers.get(window > 0, ()):
            if wrapper.rows is rows and wrapper.window == window:
                return wrapper
        wrapper = self._next_wrapper(window > 0)
        pages = pages_of(rows, kv.block_bytes)
        wrapper.plan(rows, window, pages, heads, kv.kv_heads, kv.head_dim, dtype, layer.shape.scale)
        return wrapper

    def _next_wrapper(self, windowed: bool) -> "_PlannedWrapper":
        """Return the wrapper with the oldest plan, or a new one as long as there are too few."""
        assert self._new_wrapper is not None, "there is no FlashInfer"
        wrappers = self._wrappers.setdefault(windowed, [])
        if len(wrappers) < _WRAPPERS:
            wrappers.append(_PlannedWrapper(self._new_wrapper()))
        else:
            wrappers.append(wrappers.pop(0))
        return wrappers[-1]


class _PlannedWrapper:
    """A FlashInfer wrapper, the step that its plan is for, and the memory it was planned from."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._memory = torch.empty(0, dtype=torch.int32)
        self._copied = torch.cuda.Event()
        self.rows: TokenRows | None = None
        self.window = 0
        self.pages: Pages | None = None

    def plan(
        self, rows: TokenRows | None, window: int, pages: Pages, heads: int, kv_heads: int,
        head_dim: int, dtype: torch.dtype, scale: float,
    ) -> None:  # fmt: skip
        """Wait until the last plan's copies are over, then plan the step of `rows` and `pages`."""
        self._copied.synchronize()
        self.rows = None  # the old plan is gone, even if this one fails
        parts = (
            pages.q_starts, pages.page_starts, pages.numbers, pages.last_tokens, pages.lengths
        )  # fmt: skip
        q_starts, page_starts, numbers, last_tokens, lengths = self._pin(parts)
        self._wrapper.plan(
            q_starts, page_starts, numbers, last_tokens, heads, kv_heads, head_dim, BLOCK_TOKENS,
            causal=True, sm_scale=scale, window_left=window - 1, q_data_type=dtype,
            kv_data_type=dtype, seq_lens=lengths,
        )  # fmt: skip
        self._copied.record()
        self.rows, self.window, self.pages = rows, window, pages

    def run(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        # No programmatic dependent launch: the kernel would have to signal that it has read all
        # that earlier kernels wrote.
        self._wrapper.run(q, (keys, values), out=out, enable_pdl=False)

    def _pin(self, parts: tuple[np.ndarray[Any, np.dtype[np.int32]], ...]) -> list[Tensor]:
        """Copy to pinned memory. From pageable memory, the copy to the GPU would block the host."""
        size = sum(len(part) for part in parts)
        if len(self._memory) < size:
            self._memory = _pinned(2 * size)
        pinned = list(self._memory[:size].split([len(part) for part in parts]))
        for here, part in zip(pinned, parts, strict=True):
            here.copy_(torch.from_numpy(part))
        return pinned


def _pinned(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=True)


def _kind(layer: Layer) -> FlashKind:
    kv = layer.shape.kv
    assert kv.dtype != "float32", "GPU slices have 16-bit caches"
    return FlashKind(kv.dtype, kv.head_dim, layer.weights.window > 0)
