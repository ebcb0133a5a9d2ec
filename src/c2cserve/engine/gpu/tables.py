"""What tells one model of an architecture from another, in the form graphs of decoding take it.

A graph is captured on *stand-ins*: layers whose matrices are places for tensor maps and whose
vectors are places in one buffer. A model is *seated* by copying its maps, vectors and rotary tables
there: some MiB inside HBM, and nothing is captured again. Maps say where each matrix is now, at its
home or in the weight cache, so a graph does not know that either.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from c2cserve.engine.gpu.layers import DenseHalf, GpuLayer, Matrix, SparseHalf
from c2cserve.kernels.gpu.dataflows.direct import gated_map, weight_map
from c2cserve.kernels.gpu.driver import MAP_BYTES
from c2cserve.kernels.gpu.weight import Home, WeightHandle
from c2cserve.kernels.layer import LayerWeights, Mlp

_ALIGNMENT = 16
_K_MULTIPLE = 8

Rope = tuple[Tensor, Tensor]


class Whereabouts(Protocol):
    """Where weights are now: `memory.hbm_cache`."""

    @property
    def changes(self) -> int: ...

    def location(self, w: WeightHandle) -> WeightHandle: ...


def matrices(layer: GpuLayer) -> Iterator[WeightHandle]:
    """In the order of their use."""
    yield layer.qkv.weight
    yield layer.o.weight
    match layer.second:
        case DenseHalf(gate_up, down):
            yield from (gate_up.weight, down.weight)
        case SparseHalf(router, w13, w2):
            yield from (router.weight, w13, w2)


def _map_makers(layer: GpuLayer) -> Iterator[Callable[[WeightHandle], bytes]]:
    """Of the maps by which kernels read `matrices`."""
    yield from (weight_map, weight_map)
    match layer.second:
        case DenseHalf():
            yield from (gated_map, weight_map)
        case SparseHalf():
            yield from (weight_map, weight_map, weight_map)


def vectors(layer: GpuLayer) -> Iterator[Tensor]:
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
    """Equal for models that differ only in the values of their weights."""

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


def can_be_seated(layers: Sequence[GpuLayer]) -> bool:
    """Whether kernels that go by maps take its matrices."""
    return all(w.k % _K_MULTIPLE == 0 for layer in layers for w in matrices(layer))


class ModelTables:
    """A model's own: what is copied where its architecture's graphs read."""

    def __init__(self, layers: Sequence[GpuLayer], device: torch.device) -> None:
        self._device = device
        # Without their owners: a model that is detached must not be held on to.
        self._weights = [replace(w, owner=None) for layer in layers for w in matrices(layer)]
        self._map_makers = [make for layer in layers for make in _map_makers(layer)]
        self.vectors = _packed([v for layer in layers for v in vectors(layer)])
        self.maps = torch.empty(0, dtype=torch.uint8, device=device)
        self.missing: WeightHandle | None = None
        """The first matrix that is not in HBM, at its home."""
        self.home: Home = "hbm"
        """Where that one is read; `hbm` once all matrices are there."""
        self.local_bytes = 0
        self.far_bytes = 0
        self.peer_bytes = 0
        """Of `far_bytes`, in a neighbour's memory."""
        self._seen = -1

    def look(self, where: Whereabouts | None) -> None:
        """Bring `maps` and the rest up to date."""
        changes = 0 if where is None else where.changes
        if changes == self._seen:
            return
        self._seen = changes
        now = [w if where is None else where.location(w) for w in self._weights]
        far = [w for w in now if w.home != "hbm"]
        pairs = zip(self._weights, now, strict=True)
        self.missing = next((w for w, there in pairs if there.home != "hbm"), None)
        self.home = far[0].home if far else "hbm"
        self.far_bytes = sum(w.bytes for w in far)
        self.peer_bytes = sum(w.bytes for w in far if w.home == "peer")
        self.local_bytes = sum(w.bytes for w in now) - self.far_bytes
        maps = (make(w) for make, w in zip(self._map_makers, now, strict=True))
        packed = torch.frombuffer(bytearray().join(maps), dtype=torch.uint8)
        # Pinned memory goes back once its copy is done; what reads the old maps is enqueued.
        self.maps = packed.pin_memory().to(self._device, non_blocking=True)


@dataclass(slots=True)
class Seat:
    """Where an architecture's graphs read."""

    maps: Tensor
    vectors: Tensor
    rope: Rope
    layers: dict[Home, list[GpuLayer]]
    """Stand-ins, by where the weights of those who sit are at the time (kernels hold to a share of
    a link only where there is one)."""
    maps_from: Tensor | None = None
    vectors_from: Tensor | None = None
    rope_from: Tensor | None = None

    @classmethod
    def like(cls, layers: Sequence[GpuLayer], rope: Rope, length: int, home: Home) -> "Seat":
        """For models like this one and contexts of up to `length` tokens."""
        count = sum(1 for layer in layers for _ in matrices(layer))
        device = rope[0].device
        maps = torch.zeros(count * MAP_BYTES, dtype=torch.uint8, device=device)
        packed = _packed([v for layer in layers for v in vectors(layer)])
        tables = [torch.zeros(length, t.shape[1], dtype=t.dtype, device=device) for t in rope]
        seat = cls(maps, torch.empty_like(packed), (tables[0], tables[1]), {})
        seat.stand_ins(layers, home)
        return seat

    def stand_ins(self, layers: Sequence[GpuLayer], home: Home) -> list[GpuLayer]:
        """Layers to capture with."""
        if home not in self.layers:
            places = iter(range(self.maps.data_ptr(), 1 << 62, MAP_BYTES))
            pieces = _pieces(self.vectors, [v for layer in layers for v in vectors(layer)])
            self.layers[home] = [_stand_in(one, home, places, pieces) for one in layers]
        return self.layers[home]

    def seat(self, model: ModelTables, rope: Rope) -> None:
        """The graphs' next runs are this model's."""
        if self.maps_from is not model.maps:
            self.maps.copy_(model.maps)
            self.maps_from = model.maps
        if self.vectors_from is not model.vectors:
            self.vectors.copy_(model.vectors)
            self.vectors_from = model.vectors
        if self.rope_from is not rope[0]:
            length = min(len(rope[0]), len(self.rope[0]))
            for mine, given in zip(self.rope, rope, strict=True):
                mine[:length].copy_(given[:length])
            self.rope_from = rope[0]


def _stand_in(
    layer: GpuLayer, home: Home, places: Iterator[int], pieces: Iterator[Tensor]
) -> GpuLayer:
    """In the order of `matrices` and of `vectors`."""

    def handle(w: WeightHandle) -> WeightHandle:
        return replace(w, pointer=0, home=home, owner=None, map_pointer=next(places))

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
    """A stand-in must not hold on to a model's own tensors."""
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
    """One after another, each at a multiple of 16 bytes; uint8."""
    packed = torch.zeros(sum(map(_size, parts)), dtype=torch.uint8, device=parts[0].device)
    for piece, part in zip(_pieces(packed, parts), parts, strict=True):
        piece.copy_(part)
    return packed


def _pieces(packed: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for part in like:
        yield packed[start : start + part.nbytes].view(part.dtype).view(part.shape)
        start += _size(part)
