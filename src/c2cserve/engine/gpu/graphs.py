"""How a slice launches a step's layers: decode steps as CUDA graphs, the rest kernel by kernel.

Launching a layer's kernels one by one takes the host longer than a resident model takes to run
them. A graph is one launch. There are two kinds:

- Up to 64 sequences, a graph serves any model of its architecture (`engine.gpu.tables`), so a
  switch captures nothing. It has the kernels that would be launched one by one, and so their bits.
- Above 64 sequences, GEMMs are cuBLAS's, which is given addresses. Such a graph belongs to one
  model, for as long as all of its weights stay where they are in HBM.

A step that a graph could run is padded to the graph's rows without a graph, too. Above 64 sequences
every decode step is. So the same kernels run, and the bits are the same.

A capture that fails is logged and counted. Steps of its size are launched kernel by kernel then,
for a while.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from c2cserve.engine.gpu.graph_cache import GraphCache, GraphKey, bucket
from c2cserve.engine.gpu.graph_pool import Captured, CaptureError, GraphPool
from c2cserve.engine.gpu.layers import GpuLayer, Launch, SparseHalf, run_padded
from c2cserve.engine.gpu.tables import (
    GraphBinding,
    ModelTables,
    Rope,
    architecture,
    can_be_bound,
)
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED
from c2cserve.kernels.gpu.graph_inputs import GraphInputs
from c2cserve.kernels.layer import BLOCK_TOKENS, TokenRows
from c2cserve.memory.hbm_cache import HbmCache

log = logging.getLogger(__name__)

_CONTEXT_LEAST = 1024
"""Tokens. Contexts are rounded up to powers of two, and block tables to as many blocks."""
_TOKENS_MOST = 8 << 20
"""Rows times context of a graph. With 32 heads of 128, attention's scratch takes 65 bytes for each,
544 MB at most. Only batches of very unequal contexts are larger."""

"""`GpuOps` launching layers one by one: hidden, layers, rows, rope, arena. Its result is still to
be added to hidden."""


@dataclass(frozen=True, slots=True)
class _Model:
    """A model as graphs know it. It does not keep the weights alive beyond the layers."""

    number: int
    """Counted from 1; never given to another model."""
    kind: int | None
    """Its architecture's number; None if graphs cannot run it."""
    sparse: bool
    tables: ModelTables


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments of `DecodeGraphs.run`."""

    hidden: Tensor
    layers: Sequence[GpuLayer]
    rows: TokenRows
    rope: Rope
    arena: Tensor


@dataclass(frozen=True, slots=True)
class _Graph:
    captured: Captured[Tensor]
    """The last layer's branch, to be added to `fixed.hidden`."""
    fixed: GraphInputs
    launched: Counter[str]


class DecodeGraphs:
    """The decode graphs of one lane of a slice. They belong to the slice's thread."""

    def __init__(
        self, launch: Launch, launched: Counter[str], cache: HbmCache | None, *,
        by_places: bool = False,
    ) -> None:  # fmt: skip
        """`launch` counts its launches in `launched`. `cache`: the slice's weight cache.

        `by_places`: a grid depends on where its weight is. So models of which other parts are in
        HBM have graphs of their own.
        """
        self._by_places = by_places
        self._launch = launch
        self._launched = launched
        self._cache = cache
        self._models: WeakKeyDictionary[GpuLayer, _Model] = WeakKeyDictionary()
        self._numbered = 0
        self._kinds: dict[tuple[object, ...], int] = {}
        """Numbers, because a step has no time to hash all layers' shapes."""
        self._bindings: dict[int, GraphBinding] = {}
        self._graphs: GraphCache[_Graph] = GraphCache()
        self._pool = GraphPool()
        self.replays = 0
        self.captures = 0
        self.failures = 0
        """Captures that failed."""

    def renew(self) -> None:
        """Forget all graphs, their memory and bindings. Counters go on. Nothing runs meanwhile."""
        self._models.clear()
        self._bindings.clear()
        self._graphs.clear()
        self._pool = GraphPool()

    @property
    def dropped(self) -> int:
        """Graphs that were dropped: for newer ones, or because a weight they read has moved."""
        return self._graphs.dropped

    def run(
        self, hidden: Tensor, layers: Sequence[GpuLayer], rows: TokenRows, rope: Rope, arena: Tensor
    ) -> None:
        """Run a step's layers in place: `hidden` [T, H] becomes the last layer's output."""
        step = _Step(hidden, layers, rows, rope, arena)
        decodes = len(hidden) == len(rows.context_len)
        whole = layers[0].index == 0 and len(layers) == layers[0].shape.kv.layers
        model = self._model(layers, hidden.device) if whole else None
        key = None
        if decodes:
            self._graphs.begin_step()
            key = None if model is None else self._key(step, model)
            if model is not None and key is not None and self._replayed(step, model, key):
                return
        resident = None if model is None else model.tables.resident
        if model is not None and resident is not None:
            self._count(model.tables)
            step = _Step(hidden, resident, rows, rope, arena)
        if key is not None or (decodes and len(hidden) > ROWS_STREAMED):
            repeated = model is not None and key is not None and _repeated(key, model)
            self._launch_padded(step, repeated=repeated)
        else:
            run_padded(self._launch, hidden, step.layers, rows, rope, arena)

    # ---- models ---------------------------------------------------------------------------------

    def _model(self, layers: Sequence[GpuLayer], device: torch.device) -> _Model:
        """Return the model's number, kind and tables, brought up to date."""
        model = self._models.get(layers[0])
        if model is None:
            kind = None
            if can_be_bound(layers):
                kind = self._kinds.setdefault(architecture(layers), len(self._kinds))
            self._numbered += 1
            sparse = any(isinstance(layer.second, SparseHalf) for layer in layers)
            model = _Model(self._numbered, kind, sparse, ModelTables(layers, device))
            self._models[layers[0]] = model
        if model.tables.refresh(self._cache, layers):
            self._graphs.forget(model.number)
        return model

    def _count(self, tables: ModelTables) -> None:
        """Count the weights of a step that asks the cache for none of them."""
        if self._cache is not None:
            self._cache.count(tables.local_bytes, tables.streamed_bytes, tables.peer_bytes)

    # ---- decode steps ---------------------------------------------------------------------------

    def _replayed(self, step: _Step, model: _Model, key: GraphKey) -> bool:
        """Run a decode step of a whole model as a graph. Return False where there is none."""
        binding = self._bindings.get(key.kind)
        if binding is None:
            binding = GraphBinding.like(step.layers, step.hidden.device)
            self._bindings[key.kind] = binding
        graph = self._graph(key, step, model, binding)
        if graph is None:
            return False
        if key.model == 0:
            binding.bind(model.tables)
        # A larger graph than asked for has tables of the same context.
        binding.bind_rope(key.context, step.rope)
        graph.fixed.copy_in(step.hidden, step.rows, repeated=_repeated(key, model))
        graph.captured.graph.replay()
        _add(graph.fixed, graph.captured.result, step.hidden)
        self.replays += 1
        self._launched.update(graph.launched)
        self._count(model.tables)
        return True

    def _key(self, step: _Step, model: _Model) -> GraphKey | None:
        """Return the key of the graph that would run the step, None if none may."""
        tables, seqs = model.tables, len(step.hidden)
        if model.kind is None:
            return None
        missing = tables.missing
        if self._cache is not None and missing is not None and self._cache.wants(missing):
            return None  # its weights are to be cached as they stream by
        rows = bucket(seqs)
        context = _rounded(step.rows.block_table.shape[1] * BLOCK_TOKENS, _CONTEXT_LEAST)
        if rows * context > _TOKENS_MOST:
            return None
        number = 0
        if seqs > ROWS_STREAMED:
            if tables.resident is None:
                return None
            number = model.number
        places = tables.places if self._by_places else 0
        arena = step.arena.data_ptr()
        return GraphKey(model.kind, number, rows, context, tables.home, arena, places)

    def _graph(
        self, key: GraphKey, step: _Step, model: _Model, binding: GraphBinding
    ) -> _Graph | None:
        """Return the step's graph, captured now if it is time; None if there is none."""
        graphs = self._graphs
        graph = graphs.get(key)
        if graph is None and not graphs.meet(key):
            return None
        if graph is None and graphs.wants(key):
            graphs.keep_models({model.number for model in self._models.values()})
            try:
                graph = self._capture(key, step, model, binding)
                graphs.put(key, graph)
            except CaptureError as error:
                self.failures += 1
                graphs.refuse(key)
                log.warning("decode steps of %d rows are launched kernel by kernel: %s", key.rows,
                            error)  # fmt: skip
        if graph is None and key.model == 0:
            graph = graphs.larger(key)
        return graph

    def _capture(self, key: GraphKey, step: _Step, model: _Model, binding: GraphBinding) -> _Graph:
        """Capture the step's graph. Raises `CaptureError`."""
        hidden, resident = step.hidden, model.tables.resident
        fixed = GraphInputs.make(
            key.rows, hidden.shape[1], key.context, hidden.dtype, hidden.device
        )  # fmt: skip
        layers = resident if key.model else None
        if not layers and key.places:
            layers = binding.mixed_layers(step.layers, model.tables.homes)
        elif not layers:
            layers = binding.placeholder_layers(step.layers, key.home)
        rope, before = binding.rope(key.context, step.rope), self._launched.copy()
        try:
            captured = self._pool.capture(
                lambda: self._launch(fixed.hidden, layers, fixed.rows, rope, step.arena)
            )
        finally:
            launched = self._launched - before
            self._launched.subtract(launched)  # nothing ran
        self.captures += 1
        return _Graph(captured, fixed, launched)

    def _launch_padded(self, step: _Step, *, repeated: bool) -> None:
        """Launch a decode step kernel by kernel, with as many rows as its graph has."""
        hidden, rows = step.hidden, step.rows
        context = rows.block_table.shape[1] * BLOCK_TOKENS
        count = bucket(len(hidden))
        fixed = GraphInputs.make(count, hidden.shape[1], context, hidden.dtype, hidden.device)
        fixed.copy_in(hidden, rows, repeated=repeated)
        branch = self._launch(fixed.hidden, step.layers, fixed.rows, step.rope, step.arena)
        _add(fixed, branch, hidden)


def _repeated(key: GraphKey, model: _Model) -> bool:
    """Return whether padding rows choose the first row's experts (`kernels.gpu.graph_inputs`)."""
    return model.sparse and key.model == 0


def _add(fixed: GraphInputs, branch: Tensor, hidden: Tensor) -> None:
    """Add the branch to the rows of hidden; leave padding rows out."""
    count = len(hidden)
    torch.add(fixed.hidden[:count], branch[:count], out=hidden)


def _rounded(count: int, least: int) -> int:
    """Round up to a power of two."""
    return max(least, 1 << (count - 1).bit_length())
