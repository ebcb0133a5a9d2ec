"""Safetensors files made by hand, plans over them, and what a segment must then hold.

The expected bytes are computed with numpy alone, dtype conversions included.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from c2cserve.core.tensors import Dtype
from c2cserve.memory.layout import GroupPlan, LayoutPlan, Part, TensorPlan

STORED: dict[Dtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint tensor: its values (float32, exact in `dtype`) and how they are stored."""

    values: NDArray[np.float32]
    dtype: Dtype

    @property
    def bytes(self) -> bytes:
        return encode(self.values, self.dtype)


def encode(values: NDArray[np.float32], dtype: Dtype) -> bytes:
    """Little-endian bytes, rounded to nearest even."""
    flat = np.ascontiguousarray(values, np.float32).ravel()
    if dtype == "float32":
        return flat.tobytes()
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return flat.astype(np.float16).tobytes()
    bits = flat.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16).tobytes()


def decode(data: bytes, dtype: Dtype) -> NDArray[np.float32]:
    if dtype == "float32":
        return np.frombuffer(data, np.float32)
    if dtype == "float16":
        return np.frombuffer(data, np.float16).astype(np.float32)
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def random_tensor(shape: tuple[int, ...], dtype: Dtype, seed: int) -> Stored:
    """Values of many magnitudes that `dtype` holds exactly."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)
    exact = decode(encode(values.astype(np.float32), dtype), dtype)
    return Stored(exact.reshape(shape), dtype)


def raw_file(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def write_file(path: Path, tensors: Mapping[str, Stored], *, pad: int = 0) -> Path:
    """`pad` spaces at the header's end move all data by so many bytes."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        begin = len(data)
        data += tensor.bytes
        header[name] = {
            "dtype": STORED[tensor.dtype],
            "shape": list(tensor.values.shape),
            "data_offsets": [begin, len(data)],
        }
    return raw_file(path, json.dumps(header).encode() + b" " * pad, data)


def write_sharded(directory: Path, shards: Mapping[str, Mapping[str, Stored]]) -> None:
    for file, tensors in shards.items():
        write_file(directory / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@dataclass(slots=True)
class Model:
    """A plan under construction, with the checkpoint tensors it needs."""

    stored: dict[str, Stored] = field(default_factory=dict)
    tensors: list[TensorPlan] = field(default_factory=list)
    groups: list[GroupPlan] = field(default_factory=list)

    @property
    def plan(self) -> LayoutPlan:
        return LayoutPlan(tuple(self.tensors), tuple(self.groups))

    def expected(self, name: str) -> bytes:
        """What the segment must hold for a tensor."""
        tensor = next(t for t in self.tensors if t.name == name)
        values = np.full(tensor.elements, np.nan, np.float32)
        for part in (p for group in self.groups for p in group.parts if p.target == name):
            source = self.stored[part.source].values.ravel()
            run = source[part.source_offset : part.source_offset + part.elements]
            values[part.offset : part.offset + part.elements] = run
        return encode(values, tensor.dtype)


def layered_plan(layers: int, shape: tuple[int, ...], dtype: Dtype = "float32") -> LayoutPlan:
    """One tensor and one group per layer, in order: `layers.0`, `layers.1` ..."""
    names = [f"layers.{i}" for i in range(layers)]
    return LayoutPlan(
        tuple(TensorPlan(name, shape, dtype, starts_layer=True) for name in names),
        tuple(GroupPlan(n, (Part(f"model.{n}.weight", shape, n),)) for n in names),
    )


def layered(
    layers: int, shape: tuple[int, ...], *, dtype: Dtype = "float32", stored: Dtype = "float32"
) -> Model:
    """`layered_plan` with random weights."""
    plan = layered_plan(layers, shape, dtype)
    sources = [part.source for group in plan.groups for part in group.parts]
    tensors = {name: random_tensor(shape, stored, i) for i, name in enumerate(sources)}
    return Model(tensors, list(plan.tensors), list(plan.groups))


def write_zeros(path: Path, plan: LayoutPlan) -> None:
    """A float32 checkpoint of zeros for a plan; it takes no room on the disk."""
    header, end = {}, 0
    for part in (part for group in plan.groups for part in group.parts):
        begin, end = end, end + 4 * part.elements
        header[part.source] = {
            "dtype": "F32", "shape": part.shape, "data_offsets": [begin, end],
        }  # fmt: skip
    raw_file(path, json.dumps(header).encode(), b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + end)
