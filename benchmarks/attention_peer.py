"""FlashInfer's attention over the same arena, for `attention.py`: what it plans on the host before
a step, and what it launches for a layer. It is not a dependency: without it, ours runs alone."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attention_cases import Case, Pages
from torch import Tensor

from c2cserve.kernels.layer import BLOCK_TOKENS, KvLayout

_ROOM_BYTES = 256 << 20
"""Of a wrapper's workspace, for sums of split contexts."""
_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)
"""Query heads a key head for which its decode kernel without tensor cores is compiled."""
_PLANS = 20


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to have a batch computed."""

    name: str
    plan: Callable[[], object]
    """Host work of a step, once for all layers. To be called before `run`, not within a graph."""
    run: Callable[[Tensor, Tensor, Tensor, Tensor], object]
    """A layer: q [T, heads, head_dim], keys and values of `kv_pages`, and where results go."""


class FlashInfer:
    """Its wrappers for bfloat16. Raises ImportError."""

    def __init__(self, device: torch.device) -> None:
        self._library: Any = importlib.import_module("flashinfer")
        self.version: str = self._library.__version__
        self._device = device

    def peers(self, case: Case, pages: Pages, heads: int, kv: KvLayout) -> Iterator[Peer]:
        """All that can run the batch, one after another: a wrapper's memory is large."""
        one = _Batch(self._library, self._device, pages, heads, kv)
        several = len(case.new) - case.decodes
        if not several:
            yield one.decode("fa2")
            yield one.decode("fa3")
            if heads // kv.kv_heads in _CORE_GROUPS:
                yield one.decode("cuda cores")
            return
        yield one.prefill("fa2")
        yield one.prefill("fa3")
        if case.decodes:
            for backend in ("fa2", "fa3"):
                yield _both(one, backend, several, sum(case.new[:several]))


@dataclass(frozen=True, slots=True)
class _Batch:
    library: Any
    device: torch.device
    pages: Pages
    heads: int
    kv: KvLayout

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        return self.heads, self.kv.kv_heads, self.kv.head_dim, BLOCK_TOKENS

    def _room(self) -> Tensor:
        """Zero at first, as it asks."""
        return torch.zeros(_ROOM_BYTES, dtype=torch.uint8, device=self.device)

    def prefill(self, backend: str) -> Peer:
        """Sequences of any lengths, in one launch."""
        pages = self.pages
        wrapper = self.library.BatchPrefillWithPagedKVCacheWrapper(
            self._room(), "HND", backend=backend
        )
        plan = partial(
            wrapper.plan, pages.q_start, pages.starts, pages.numbers.to(self.device),
            pages.last_tokens, *self._shape, causal=True, q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return Peer(backend, plan, _runner(wrapper))

    def decode(self, backend: str) -> Peer:
        """A token of each sequence. Made for graphs that are replayed with other lengths."""
        pages, count = self.pages, len(self.pages.last_tokens)

        def numbers(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self.device)

        wrapper = self.library.BatchDecodeWithPagedKVCacheWrapper(
            self._room(), "HND", use_cuda_graph=True, use_tensor_cores=backend != "cuda cores",
            paged_kv_indptr_buffer=numbers(count + 1),
            paged_kv_indices_buffer=numbers(len(pages.numbers)),
            paged_kv_last_page_len_buffer=numbers(count),
            backend="fa2" if backend == "cuda cores" else backend,
        )  # fmt: skip
        plan = partial(
            wrapper.plan, pages.starts, pages.numbers.to(self.device), pages.last_tokens,
            *self._shape, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return Peer(backend, plan, _runner(wrapper))


def _runner(wrapper: Any) -> Callable[[Tensor, Tensor, Tensor, Tensor], object]:
    def run(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> object:
        return wrapper.run(q, (keys, values), out=out)

    return run


def _both(batch: _Batch, backend: str, several: int, tokens: int) -> Peer:
    """The sequences of several new tokens (the first ones) and those of one apart, as servers do:
    `tokens` belong to the former."""
    pages = batch.pages
    middle = int(pages.starts[several])
    first = Pages(pages.q_start[: several + 1], pages.starts[: several + 1],
                  pages.numbers[:middle], pages.last_tokens[:several])  # fmt: skip
    rest = Pages(pages.q_start[several:] - tokens, pages.starts[several:] - middle,
                 pages.numbers[middle:], pages.last_tokens[several:])  # fmt: skip
    prefill = _Batch(batch.library, batch.device, first, batch.heads, batch.kv).prefill(backend)
    decode = _Batch(batch.library, batch.device, rest, batch.heads, batch.kv).decode("fa2")

    def plan() -> None:
        prefill.plan()
        decode.plan()

    def run(q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        prefill.run(q[:tokens], keys, values, out[:tokens])
        decode.run(q[tokens:], keys, values, out[tokens:])

    return Peer(f"{backend}, fa2 for single tokens", plan, run)


# ---- what planning costs -------------------------------------------------------------------------


def planning(peer: Peer, synchronize: Callable[[], None]) -> dict[str, Any]:
    """Seconds of the host for one step's plan, and until what it copies is there. The tables it is
    given are on the host, the page numbers on the GPU."""
    asked: list[float] = []
    done: list[float] = []
    peer.plan()  # the first loads the kernels
    for _ in range(_PLANS):
        synchronize()
        begin_s = perf_counter()
        peer.plan()
        asked.append(perf_counter() - begin_s)
        synchronize()
        done.append(perf_counter() - begin_s)
    return {"plan_s": median(asked), "plan_done_s": median(done)}


def plan_copies(peer: Peer, synchronize: Callable[[], None]) -> dict[str, int] | None:
    """What a plan copies to the GPU, as the profiler sees it; None where it sees nothing. Nothing
    is to be timed after it: the profiler's hooks may stay."""
    peer.plan()
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        peer.plan()
        synchronize()
    trace: Any = profile.profiler
    copied = [event.nbytes() for event in trace.kineto_results.events() if "HtoD" in event.name()]
    return {"count": len(copied), "bytes": sum(copied)} if copied else None
