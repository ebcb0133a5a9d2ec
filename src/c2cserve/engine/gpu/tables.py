"""What tells one model of an architecture from another, in the form that decode graphs read.

    model A   maps A | vectors A | rope A  --bind-.
    model B   maps B | vectors B | rope B  --bind-+->  maps | vectors | rope  <-- read by the graphs

A graph is captured on *placeholder weights*: layers whose matrices are places for tensor maps and
whose vectors are places in one buffer. Binding a model copies its maps, vectors and rotary tables
to these places. That moves some MiB inside HBM, and nothing is captured again. A map says where a
matrix is now, at its home or in the weight cache, so a graph does not depend on that either.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.engine.gpu.layers import DenseHalf, GpuLayer, Matrix, SparseHalf, handle_of
from c2cserve.kernels.gpu.driver import MAP_BYTES
from c2cserve.kernels.gpu.gemm.launchers.direct import gated_map, weight_map
from c2cserve.kernels.gpu.gemm.weight import WeightHandle, for_libraries
from c2cserve.kernels.layer import Layer, LayerWeights, Mlp
from c2cserve.memory.hbm_cache import HbmCache

_ALIGNMENT = 16
_K_MULTIPLE = 8

Rope = tuple[Tensor, Tensor]


def matrices(layer: GpuLayer) -> Iterator[WeightHandle]:
    """Yield the layer's matrices in the order of their use."""
    yield layer.qkv.weight
    yield layer.o.weight
    match layer.second:
        case DenseHalf(gate_up, down):
            yield from (gate_up.weight, down.weight)
        case SparseHalf(router, w13, w2):
            yield from (router.weight, w13, w2)


def matrices_by_layer(
    layers: Sequence[Layer], head: Tensor, device: torch.device
) -> list[list[WeightHandle]]:
    """Return all matrices that steps multiply by, at their home: those of each layer, in the order
    of their use. The head is with the last layer."""
    mine = [layer for layer in layers if isinstance(layer, GpuLayer)]
    assert len(mine) == len(layers), "layers were prepared by other operators"
    found = [list(matrices(layer)) for layer in mine]
    found[-1].append(handle_of(head, device))
    return found


def _map_makers(layer: GpuLayer) -> Iterator[Callable[[WeightHandle], bytes]]:
    """Yield what makes the maps by which kernels read `matrices`."""
    yield from (weight_map, weight_map)
    match layer.second:
        case DenseHalf():
            yield from (gated_map, weight_map)
        case SparseHalf():
            yield from (weight_map, weight_map, weight_map)


def vectors(layer: GpuLayer) -> Iterator[Tensor]:
    """Yield the layer's norm weights, then its biases."""
    weights = layer.weights
    yield from (weights.input_norm, weights.post_norm)
    yield from weights.qk_norms or ()
    biased = [layer.qkv, layer.o]
    match layer.second:
        case DenseHalf(gate_up, down):
            biased += [gate_up, down]
        case SparseHalf(router):
            biased.append(router)
    yield from (matrix.bias for matrix in biased if matrix.bias is not None)


def architecture(layers: Sequence[GpuLayer]) -> tuple[object, ...]:
    """Return a key that is equal for models that differ only in the values of their weights."""

    def one(layer: GpuLayer) -> tuple[object, ...]:
        second = layer.second
        routed = None
        if isinstance(second, SparseHalf):
            routed = (second.per_token, second.renormalize)
        shapes = tuple((w.shape, w.dtype) for w in matrices(layer))
        sizes = tuple((v.shape, v.dtype) for v in vectors(layer))
        biased = layer.qkv.bias is not None, layer.o.bias is not None
        return shapes, sizes, biased, layer.weights.window, routed

    return layers[0].shape, tuple(one(layer) for layer in layers)


def can_be_bound(layers: Sequence[GpuLayer]) -> bool:
    """Return whether kernels that read tensor maps take the model's matrices."""
    return all(w.k % _K_MULTIPLE == 0 for layer in layers for w in matrices(layer))


class ModelTables:
    """Where a model's weights are now, and the maps and vectors that binding it copies.

    Nothing in it refers to the layers it was made for.
    """

    def __init__(self, layers: Sequence[GpuLayer], device: torch.device) -> None:
        self._device = device
        self._map_makers = [make for layer in layers for make in _map_makers(layer)]
        self._like = [
            replace(w, owner=None, transposed=None) for layer in layers for w in matrices(layer)
        ]
        self.vectors = _packed([v for layer in layers for v in vectors(layer)])
        self._maps: Tensor | None = None
        self.missing: WeightHandle | None = None
        """The first matrix that is not in HBM, at its home."""
        self.home: Home = "hbm"
        """Where `missing` is read; `hbm` once all matrices are there."""
        self.homes: tuple[Home, ...] = ()
        """Where each matrix is read."""
        self.places = 0
        """A hash of `homes`; 0 while all matrices have the same one. Graphs of two models whose
        hashes are equal by chance would only read with an unfavourable number of CTAs."""
        self.resident: list[GpuLayer] | None = None
        """The layers with all matrices where they are in HBM; None while one is elsewhere."""
        self.local_bytes = 0
        self.streamed_bytes = 0
        self.peer_bytes = 0
        """The part of `streamed_bytes` that is on another GPU."""
        self._seen = -1
        self._places: list[tuple[Home, int]] = []

    def refresh(self, cache: HbmCache | None, layers: Sequence[GpuLayer]) -> bool:
        """Bring everything up to date. Return whether one of this model's weights has moved."""
        changes = 0 if cache is None else cache.changes
        if changes == self._seen:
            return False
        self._seen = changes
        weights = [w for layer in layers for w in matrices(layer)]
        now = [w if cache is None else cache.location(w) for w in weights]
        places: list[tuple[Home, int]] = [(w.home, w.pointer) for w in now]
        if places == self._places:
            return False  # what came or went was another model's
        self._places = places
        streamed = [w for w in now if w.home != "hbm"]
        pairs = zip(weights, now, strict=True)
        missing = next((w for w, located in pairs if located.home != "hbm"), None)
        # The owner is left out: this must not keep a detached model's memory alive.
        self.missing = None if missing is None else replace(missing, owner=None)
        self.home = streamed[0].home if streamed else "hbm"
        self.homes = tuple(w.home for w in now)
        self.places = hash(self.homes) if len(set(self.homes)) > 1 else 0
        self.streamed_bytes = sum(w.bytes for w in streamed)
        self.peer_bytes = sum(w.bytes for w in streamed if w.home == "peer")
        self.local_bytes = sum(w.bytes for w in now) - self.streamed_bytes
        self.resident = None if streamed else _located(layers, now)
        self._maps = None
        return True

    @property
    def maps(self) -> Tensor:
        """The maps of all matrices where they are now. They are made when a graph is bound for the
        first time: prompts do without, and the decode step after one is launched beside it."""
        if self._maps is None:
            maps = bytearray()
            for make, like, place in zip(self._map_makers, self._like, self._places, strict=True):
                home, pointer = place
                maps += make(replace(like, home=home, pointer=pointer))
            packed = torch.frombuffer(maps, dtype=torch.uint8)
            # Pinned memory is reused once its copy is done. Work that reads the old maps is
            # enqueued.
            self._maps = packed.pin_memory().to(self._device, non_blocking=True)
        return self._maps


@dataclass(slots=True)
class GraphBinding:
    """The memory that an architecture's graphs read, and the model that is bound to it."""

    maps: Tensor
    vectors: Tensor
    layers: dict[Home, list[GpuLayer]]
    """Placeholder layers by the home of the bound model's weights. Kernels keep to a share of a
    link only where they read over one."""
    ropes: dict[int, Rope]
    """Rotary tables by their length. A longer context has its own tables, because the graphs of
    shorter contexts know the addresses of theirs."""
    maps_from: Tensor | None = None
    vectors_from: Tensor | None = None
    ropes_from: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @classmethod
    def like(cls, layers: Sequence[GpuLayer], device: torch.device) -> "GraphBinding":
        """Return memory for models like this one."""
        count = sum(1 for layer in layers for _ in matrices(layer))
        maps = torch.zeros(count * MAP_BYTES, dtype=torch.uint8, device=device)
        packed = _packed([v for layer in layers for v in vectors(layer)])
        return cls(maps, torch.empty_like(packed), {}, {})

    def placeholder_layers(self, layers: Sequence[GpuLayer], home: Home) -> list[GpuLayer]:
        """Return the layers to capture a graph with, all matrices at one home."""
        if home not in self.layers:
            self.layers[home] = self.mixed_layers(layers, repeat(home))
        return self.layers[home]

    def mixed_layers(self, layers: Sequence[GpuLayer], homes: Iterable[Home]) -> list[GpuLayer]:
        """Return new layers to capture a graph with. `homes`: one for each matrix."""
        places = zip(homes, range(self.maps.data_ptr(), 1 << 62, MAP_BYTES), strict=False)
        pieces = _pieces(self.vectors, [v for layer in layers for v in vectors(layer)])
        return [_placeholder(one, places, pieces) for one in layers]

    def rope(self, length: int, like: Rope) -> Rope:
        """Return rotary tables to capture a graph with, for contexts of up to `length` tokens."""
        if length not in self.ropes:
            cos, sin = (t.new_zeros(length, t.shape[1]) for t in like)
            self.ropes[length] = cos, sin
        return self.ropes[length]

    def bind(self, model: ModelTables) -> None:
        """Make the next runs of the architecture's graphs this model's."""
        if self.maps_from is not model.maps:
            self.maps.copy_(model.maps)
            self.maps_from = model.maps
        if self.vectors_from is not model.vectors:
            self.vectors.copy_(model.vectors)
            self.vectors_from = model.vectors

    def bind_rope(self, length: int, rope: Rope) -> None:
        """Make the next runs of graphs for contexts of `length` tokens rotate by `rope`."""
        if self.ropes_from.get(length) is not rope[0]:
            mine = self.rope(length, rope)
            shorter = min(length, len(rope[0]))
            for table, given in zip(mine, rope, strict=True):
                table[:shorter].copy_(given[:shorter])
            self.ropes_from[length] = rope[0]


def _located(layers: Sequence[GpuLayer], now: Sequence[WeightHandle]) -> list[GpuLayer]:
    """Return the layers with the matrices of `now`: all in HBM, in the order of `matrices`."""
    places = iter(now)

    def matrix(like: Matrix) -> Matrix:
        return Matrix(for_libraries(next(places)), like.bias)

    located: list[GpuLayer] = []
    for layer in layers:
        qkv, o = matrix(layer.qkv), matrix(layer.o)
        half: DenseHalf | SparseHalf
        match layer.second:
            case DenseHalf(gate_up, down):
                half = DenseHalf(matrix(gate_up), matrix(down))
            case SparseHalf(router) as sparse:
                half = replace(sparse, router=matrix(router), w13=next(places), w2=next(places))
        located.append(replace(layer, qkv=qkv, o=o, second=half))
    return located


def _placeholder(
    layer: GpuLayer, places: Iterator[tuple[Home, int]], pieces: Iterator[Tensor]
) -> GpuLayer:
    """Return a layer of placeholder weights; `places` and `pieces` are in the order of `matrices`
    and `vectors`."""

    def handle(w: WeightHandle) -> WeightHandle:
        home, map_pointer = next(places)
        return replace(w, pointer=0, home=home, owner=None, map_pointer=map_pointer)

    def matrix(weight: WeightHandle, like: Matrix) -> Matrix:
        return Matrix(weight, None if like.bias is None else next(pieces))

    second = layer.second
    qkv_w, o_w = handle(layer.qkv.weight), handle(layer.o.weight)
    seconds = [handle(w) for w in list(matrices(layer))[2:]]
    weights = _no_matrices(layer.weights, pieces)
    qkv, o = matrix(qkv_w, layer.qkv), matrix(o_w, layer.o)
    half: DenseHalf | SparseHalf
    match second:
        case DenseHalf(gate_up, down):
            half = DenseHalf(matrix(seconds[0], gate_up), matrix(seconds[1], down))
        case SparseHalf(router):
            half = replace(second, router=matrix(seconds[0], router), w13=seconds[1], w2=seconds[2])
    return replace(layer, weights=weights, qkv=qkv, o=o, second=half)


def _no_matrices(weights: LayerWeights, pieces: Iterator[Tensor]) -> LayerWeights:
    """Return placeholder vectors and no matrices: a model's tensors must not be kept alive."""
    nothing = torch.empty(0)
    input_norm, post_norm = next(pieces), next(pieces)
    return LayerWeights(
        input_norm=input_norm,
        qkv=nothing,
        qkv_bias=None,
        qk_norms=(next(pieces), next(pieces)) if weights.qk_norms else None,
        o=nothing,
        o_bias=None,
        post_norm=post_norm,
        mlp=Mlp(nothing, None, nothing, None),
        window=weights.window,
    )


def _size(vector: Tensor) -> int:
    return -(-vector.nbytes // _ALIGNMENT) * _ALIGNMENT


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """Pack tensors into one of uint8, each at a multiple of 16 bytes."""
    packed = torch.zeros(sum(map(_size, parts)), dtype=torch.uint8, device=parts[0].device)
    for piece, part in zip(_pieces(packed, parts), parts, strict=True):
        piece.copy_(part)
    return packed


def _pieces(packed: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the views of a packed tensor that have the shapes and dtypes of `like`."""
    start = 0
    for part in like:
        yield packed[start : start + part.nbytes].view(part.dtype).view(part.shape)
        start += _size(part)
