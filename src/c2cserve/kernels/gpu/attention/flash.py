"""Attention of prompts by FlashInfer's kernel for Hopper (FlashAttention 3), over our arena.

Steps of more rows than our own GEMMs take come here: their bits depend on how prompts are cut in
any case. Sequences of one new token, smaller steps and kinds without a module stay with
`kernels.gpu.attention.paged`. FlashInfer's public wrapper is all that is used; its modules were
built ahead, and it is told to compile nothing.

A wrapper is planned on the host, once for all layers of a step: who computes which tile, copied to
the GPU behind what was launched before. The plan is written into pinned memory that the next one
overwrites, and while a step is planned the copy of the one before may still wait behind the step
before that. So there are two wrappers in turn, and either is planned anew only when its last
copies are over: with two steps in flight, they are. (Memory on the GPU is overwritten in the
stream's order.) A step that is parked and finds its wrapper taken plans again.
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

_TURNS = 2
"""Wrappers, each of 8 MiB pinned and as much on the GPU."""


class Flash:
    """One per slice; belongs to its thread and stream."""

    def __init__(self, device: torch.device, wrapper: Callable[[], Any] | None) -> None:
        """`wrapper` makes a planless `BatchPrefillWithPagedKVCacheWrapper`; None: there is no
        FlashInfer, and nothing is taken."""
        self._device = device
        self._wrapper = wrapper
        self.kinds: set[FlashKind] = set()
        """Those that come here."""
        self._turns: dict[bool, list[_Turn]] = {}
        """By whether there is a window, the one that was planned last at the end."""
        self.steps = 0
        """Of more rows than our GEMMs take: those whose prompts came here,"""
        self.missed = 0
        """and those whose prompts could not."""

    def ready(self, kind: FlashKind, heads: int, kv_heads: int) -> None:
        """From now on this kind comes here: run it once, so that all of it is loaded. Raises what
        FlashInfer does."""
        dtype, dim = TORCH_DTYPES[kind.dtype], kind.head_dim
        ones = np.array([1], np.int32)
        pages = Pages(
            0, 2, 0, 2 * np.arange(2, dtype=np.int32), np.arange(2, dtype=np.int32), ones - 1,
            2 * ones, 2 * ones,
        )  # fmt: skip
        turn = self._turn(kind.windowed)
        turn.plan(None, int(kind.windowed), pages, heads, kv_heads, dim, dtype, 1.0)
        cache = torch.zeros(2, 1, kv_heads, BLOCK_TOKENS, dim, dtype=dtype, device=self._device)
        q = torch.zeros(2, heads, dim, dtype=dtype, device=self._device)
        turn.run(q, cache[0], cache[1], torch.empty_like(q))
        self.kinds.add(kind)

    def renew(self) -> None:
        """Forget plans, which a failed step may have left half made. Nothing runs meanwhile."""
        self._turns.clear()

    def __call__(
        self, qkv: Tensor, layer: Layer, rows: TokenRows, arena: Tensor, out: Tensor
    ) -> bool:
        """Attend with the sequences of several new tokens, whose keys and values are in the arena
        and whose queries are rotated: qkv [T, (Hq + 2 Hkv) D] -> their rows of `out` [T, Hq D].
        Returns whether it did; rows of single tokens may hold anything then."""
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
        turn = self._planned(rows.host, layer, heads, qkv.dtype)
        pages = turn.pages
        assert pages is not None, "it was planned"
        several, count = slice(pages.begin, pages.end), pages.end - pages.begin
        q = qkv[several].view(count, -1, kv.head_dim)[:, :heads]
        keys, values = paged(arena.view(qkv.dtype), kv, layer.index, pages.unit)
        turn.run(q, keys, values, out[several].view(count, heads, kv.head_dim))
        return True

    def _planned(self, rows: TokenRows, layer: Layer, heads: int, dtype: torch.dtype) -> "_Turn":
        """The wrapper that has the step's plan; `rows` are the step's on the host."""
        kv, window = layer.shape.kv, layer.weights.window
        for turn in self._turns.get(window > 0, ()):
            if turn.rows is rows and turn.window == window:
                return turn
        turn = self._turn(window > 0)
        pages = pages_of(rows, kv.block_bytes)
        turn.plan(rows, window, pages, heads, kv.kv_heads, kv.head_dim, dtype, layer.shape.scale)
        return turn

    def _turn(self, windowed: bool) -> "_Turn":
        """The wrapper that was not planned for longest."""
        assert self._wrapper is not None, "there is no FlashInfer"
        turns = self._turns.setdefault(windowed, [])
        turns.append(turns.pop(0) if len(turns) == _TURNS else _Turn(self._wrapper()))
        return turns[-1]


class _Turn:
    """A wrapper, whose plan it has, and what that plan is copied from."""

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
        """For `rows`, which `pages` are of. Waits until the last plan's copies are over."""
        self._copied.synchronize()
        self.rows = None  # whatever comes of it, the old plan is gone
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
        # Without programmatic launch: it would have to say when it has read what came before.
        self._wrapper.run(q, (keys, values), out=out, enable_pdl=False)

    def _pin(self, parts: tuple[np.ndarray[Any, np.dtype[np.int32]], ...]) -> list[Tensor]:
        """Copies in pinned memory: copied from elsewhere, they would be waited for."""
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
