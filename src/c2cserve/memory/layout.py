"""How a model's weights lie in its pool segment: data, made by the engine, obeyed by the loader.

Tensors lie in the order they are loaded, fused as the kernels want them. A *group* is what becomes
usable as a whole: the embedding table, one layer, one expert of one layer, the head.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]
ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor (or a contiguous run of it) that fills a contiguous run of a target.

    `offset` counts elements into the flattened target; `source_offset` and `count` (elements)
    select a run of the flattened source, all of it when `count` is None.
    """

    source: str
    shape: tuple[int, ...]
    offset: int = 0
    source_offset: int = 0
    count: int | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape) if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the segment. Its parts cover it exactly once."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Tensors that become usable together. `layer` is the decoder layer, -1 for none."""

    name: str
    tensors: tuple[TensorPlan, ...]
    layer: int = -1


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """All groups in load order. `optional` checkpoint tensors may be present and are not used
    (e.g. rotary inverse frequencies, a tied head stored anyway)."""

    groups: tuple[GroupPlan, ...]
    optional: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for group in self.groups for tensor in group.tensors)
