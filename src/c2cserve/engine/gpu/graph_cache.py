"""Which decode graphs there are, and when the next one may be captured. Nothing here needs a GPU.

    rows of a step     1  2  4  8  16  24 .. 64  68 .. 128  136 .. 256  272 ..
                       `--- x 2 -'`--- + 8 ---'`--- + 4 --'`--- + 8 --'`- + 16

A graph is wanted when its size was met before, and while the allowance lasts. The allowance keeps
traffic that sweeps through all sizes from capturing in every step. When there are too many graphs,
the one that was unused for longest is dropped.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu.gemm.choice.choose import ROWS_STREAMED

_GRAPHS_MOST = 128
"""Graphs of a slice. Two contexts of one model have some 60 sizes each up to 512 sequences."""
_MET_MOST = 8 * _GRAPHS_MOST
_BURST = 8
_STEPS_PER_CAPTURE = 8
"""Decode steps that earn one capture, of which up to `_BURST` are saved. A capture takes about as
long as launching its step kernel by kernel."""
_STEPS_PER_RETRY = 256
_RETRY_EXPONENT_MOST = 6
"""Decode steps until a size whose capture failed is tried again: 256, and four times as many after
each further failure, up to a million."""


class GraphKey(NamedTuple):
    """What a graph was captured for."""

    kind: int
    """The architecture's number."""
    model: int
    """The model's number, for a graph that knows its weights' addresses; 0: any of its kind."""
    rows: int
    context: int
    """Tokens that block tables and rotary tables have room for."""
    home: Home
    """Where the first weight that is not in HBM is read; `hbm` if all are there."""
    arena: int
    """The arena's address."""
    places: int = 0
    """Tells apart which of a model's weights are where, if its graphs depend on it; else 0."""


def bucket(seqs: int) -> int:
    """The rows that a step of `seqs` sequences is padded to: above 64 at most 6 % more."""
    if seqs <= 8:
        return 1 << (seqs - 1).bit_length()
    step = 8 if seqs <= ROWS_STREAMED else 4 if seqs <= 128 else 8 if seqs <= 256 else 16
    return -(-seqs // step) * step


_Graph = TypeVar("_Graph")


class GraphCache(Generic[_Graph]):
    """Graphs by their keys, at most `most`. Not thread-safe."""

    def __init__(self, most: int = _GRAPHS_MOST) -> None:
        self._most = most
        self._graphs: dict[GraphKey, _Graph] = {}
        """The one that was used last at the end."""
        self._met: dict[GraphKey, None] = {}
        self._refused: dict[GraphKey, tuple[int, int]] = {}
        """How often in a row the capture failed, and the step from which on it may be tried again.
        """
        self._steps = 0
        self._allowance = float(_BURST)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def begin_step(self) -> None:
        """Count a decode step: captures are earned by steps."""
        self._steps += 1
        self._allowance = min(_BURST, self._allowance + 1 / _STEPS_PER_CAPTURE)

    def get(self, key: GraphKey) -> _Graph | None:
        """Return the graph of this very key."""
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._graphs[key] = graph
        return graph

    def larger(self, key: GraphKey) -> _Graph | None:
        """Return the next larger graph that serves `key` at less than twice its rows, if there is
        one."""
        rows = bucket(key.rows + 1)
        while rows <= min(2 * key.rows, ROWS_STREAMED):
            graph = self.get(key._replace(rows=rows))
            if graph is not None:
                return graph
            rows = bucket(rows + 1)
        return None

    def meet(self, key: GraphKey) -> bool:
        """Note that a step would use such a graph; return whether one has before.

        The first one has to be launched kernel by kernel, with the graph's rows, even if a larger
        graph could serve it. What loads on first use does so in that step, not in a capture."""
        if key in self._met:
            return True
        self._met[key] = None
        if len(self._met) > _MET_MOST:
            del self._met[next(iter(self._met))]
        return False

    def wants(self, key: GraphKey) -> bool:
        """Return whether to capture this graph now, of a size that was met before."""
        _, again = self._refused.get(key, (0, 0))
        if self._steps < again or self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def put(self, key: GraphKey, graph: _Graph) -> None:
        """Keep a graph that was captured, in place of the one unused for longest."""
        while len(self._graphs) >= self._most:
            self._drop(next(iter(self._graphs)))
        self._graphs[key] = graph
        self._refused.pop(key, None)

    def refuse(self, key: GraphKey) -> None:
        """Do not want this one for a while: its capture failed, maybe for want of memory."""
        failures = self._refused.get(key, (0, 0))[0] + 1
        wait = _STEPS_PER_RETRY * 4 ** min(failures - 1, _RETRY_EXPONENT_MOST)
        self._refused[key] = failures, self._steps + wait

    def forget(self, model: int) -> None:
        """Drop the graphs that know the addresses of this model's weights."""
        self._forget(lambda key: key.model == model)

    def keep_models(self, alive: set[int]) -> None:
        """Drop the graphs of all models but these; those of any model of a kind stay."""
        self._forget(lambda key: key.model != 0 and key.model not in alive)

    def clear(self) -> None:
        """Drop all graphs, and forget the sizes that were met."""
        self._forget(lambda _key: True)

    def _forget(self, gone: Callable[[GraphKey], bool]) -> None:
        for key in [key for key in self._graphs if gone(key)]:
            self._drop(key)
        self._met = {key: None for key in self._met if not gone(key)}
        self._refused = {key: since for key, since in self._refused.items() if not gone(key)}

    def _drop(self, key: GraphKey) -> None:
        del self._graphs[key]
        self.dropped += 1
