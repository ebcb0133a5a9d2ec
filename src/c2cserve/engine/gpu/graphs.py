"""Decode steps as CUDA graphs: per architecture, batch and context, for any model of it.

Launching a layer's kernels one by one takes the host longer than a resident model takes to run
them. A graph is one launch. It knows no model (`engine.gpu.tables`), so a switch captures nothing:
graphs are made when a size is met for the second time, once for all models of an architecture. The
kernels are those that would have been launched one by one; the answers are bit for bit the same.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from c2cserve.engine.gpu.layers import GpuLayer
from c2cserve.engine.gpu.tables import (
    ModelTables,
    Rope,
    Seat,
    Whereabouts,
    architecture,
    can_be_seated,
)
from c2cserve.kernels.gpu.choose import ROWS_STREAMED
from c2cserve.kernels.gpu.fixed_rows import FixedRows
from c2cserve.kernels.gpu.measure import no_collection
from c2cserve.kernels.gpu.weight import Home, WeightHandle
from c2cserve.kernels.layer import BLOCK_TOKENS, TokenRows

_CONTEXT_LEAST = 1024
"""Tokens; contexts are rounded up to powers of two, and block tables to as many blocks."""

Run = Callable[[Tensor, Sequence[GpuLayer], TokenRows, Rope, Tensor], Tensor]
"""`GpuOps` launching layers one by one: hidden, layers, rows, rope, arena. What it returns is to be
added to hidden."""


class Cached(Whereabouts, Protocol):
    """The weight cache as graphs see it."""

    def wants(self, w: WeightHandle) -> bool:
        """Whether W would be kept if it streamed by now."""
        ...

    def count(self, hit_bytes: int, streamed_bytes: int, peer_bytes: int) -> None: ...


@dataclass(slots=True)
class _Model:
    """None of it keeps the model's weights alive beyond its layers."""

    kind: int | None
    """Its architecture's number; None if graphs can not run it."""
    tables: ModelTables


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    fixed: FixedRows
    branch: Tensor
    """The last layer's, to be added to `fixed.hidden`."""
    launched: Counter[str]


_Key = tuple[int, int, int, Home, int]
"""Architecture, rows, context, where the weights are, and the arena's address."""


class DecodeGraphs:
    """One per slice; belongs to its thread, as its lane does."""

    def __init__(self, run: Run, launched: Counter[str], cached: Cached | None) -> None:
        """`launched`: what `run` counts its launches in."""
        self._run = run
        self._launched = launched
        self._cached = cached
        self._models: WeakKeyDictionary[GpuLayer, _Model] = WeakKeyDictionary()
        self._kinds: dict[tuple[object, ...], int] = {}
        """Numbers, because a step has no time to hash all layers' shapes."""
        self._seats: dict[int, Seat] = {}
        self._graphs: dict[_Key, _Graph] = {}
        self._met: set[_Key] = set()
        self._pool: Any = None
        """Of the memory between kernels: no two graphs of a slice run at once."""
        self.replays = 0
        self.captures = 0

    def __call__(
        self, hidden: Tensor, layers: Sequence[GpuLayer], rows: TokenRows, rope: Rope, arena: Tensor
    ) -> bool:
        """Run a step, in place, if it is one for graphs: all layers, one new token a sequence."""
        seqs, first = len(rows.context_len), layers[0]
        whole = first.index == 0 and len(layers) == first.shape.kv.layers
        if not whole or len(hidden) != seqs or seqs > ROWS_STREAMED:
            return False
        model = self._model(layers, hidden.device)
        if model.kind is None:
            return False
        tables = model.tables
        tables.look(self._cached)
        cached, missing = self._cached, tables.missing
        if cached is not None and missing is not None and cached.wants(missing):
            return False  # its weights are to be kept as they stream by
        context = _rounded(rows.block_table.shape[1] * BLOCK_TOKENS, _CONTEXT_LEAST)
        key = (model.kind, _rounded(seqs, 1), context, tables.home, arena.data_ptr())
        graph = self._graphs.get(key)
        if graph is None and key not in self._met:
            self._met.add(key)  # whatever loads on first use does so outside of a capture
            return False
        seat = self._seat(model.kind, layers, rope, context, tables.home)
        seat.seat(tables, rope)
        if graph is None:
            graph = self._capture(key, seat, layers, hidden, arena)
        graph.fixed.settle(hidden, rows)
        graph.graph.replay()
        torch.add(graph.fixed.hidden[:seqs], graph.branch[:seqs], out=hidden)
        self._count(graph, tables)
        return True

    def _model(self, layers: Sequence[GpuLayer], device: torch.device) -> _Model:
        model = self._models.get(layers[0])
        if model is None:
            kind = None
            if can_be_seated(layers):
                kind = self._kinds.setdefault(architecture(layers), len(self._kinds))
            model = self._models[layers[0]] = _Model(kind, ModelTables(layers, device))
        return model

    def _seat(
        self, kind: int, layers: Sequence[GpuLayer], rope: Rope, context: int,
        home: Home,
    ) -> Seat:  # fmt: skip
        """The architecture's, with room for rotary tables of `context` tokens."""
        seat = self._seats.get(kind)
        if seat is None or len(seat.rope[0]) < context:
            # Graphs of shorter contexts know the old one's addresses.
            for key in [key for key in self._graphs if key[0] == kind]:
                del self._graphs[key]
            seat = self._seats[kind] = Seat.like(layers, rope, context, home)
        return seat

    def _capture(
        self, key: _Key, seat: Seat, layers: Sequence[GpuLayer], hidden: Tensor, arena: Tensor
    ) -> _Graph:
        _, count, context, home, _ = key
        fixed = FixedRows.make(count, hidden.shape[1], context, hidden.dtype, hidden.device)
        stand_ins = seat.stand_ins(layers, home)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, before = torch.cuda.CUDAGraph(), self._launched.copy()
        with no_collection():
            # Other slices' threads go on meanwhile: what they call is theirs.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                branch = self._run(fixed.hidden, stand_ins, fixed.rows, seat.rope, arena)
            finally:
                graph.capture_end()
        made = self._graphs[key] = _Graph(graph, fixed, branch, self._launched - before)
        self._launched.subtract(made.launched)  # nothing ran
        self.captures += 1
        return made

    def _count(self, graph: _Graph, tables: ModelTables) -> None:
        self.replays += 1
        self._launched.update(graph.launched)
        if self._cached is not None:
            self._cached.count(tables.local_bytes, tables.far_bytes, tables.peer_bytes)


def _rounded(count: int, least: int) -> int:
    """Up to a power of two."""
    return max(least, 1 << (count - 1).bit_length())
