"""How a model's weights lie in its pool segment: data, made by the engine, obeyed by the loader.

Tensors lie in the order of `LayoutPlan.tensors`, fused as the kernels want them. They are filled
group by group, in the order of `LayoutPlan.groups`; a *group* is what becomes usable as a whole:
the embedding table, one layer, one expert of one layer, the head.
"""

from dataclasses import dataclass
from math import prod

from c2cserve.core.tensors import ITEM_BYTES, Dtype


class PlanError(ValueError):
    """A layout plan contradicts itself."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor of the segment; `starts_layer` asks for the alignment of a layer."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    starts_layer: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint tensor (or a contiguous run of it) that fills a contiguous run of `target`.

    `shape` is what the checkpoint must have. `offset` counts elements into the flattened target;
    `source_offset` and `count` (elements) select a run of the source, all of it by default.
    """

    source: str
    shape: tuple[int, ...]
    target: str
    offset: int = 0
    source_offset: int = 0
    count: int | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape) if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class GroupPlan:
    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """`optional`: suffixes of checkpoint tensors that may be present and are not used (rotary
    frequencies, a tied head stored anyway)."""

    tensors: tuple[TensorPlan, ...]
    groups: tuple[GroupPlan, ...]
    optional: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    def check(self) -> None:
        """Raises `PlanError` unless every tensor is filled once, from inside its sources."""
        runs: dict[str, list[tuple[int, int]]] = {tensor.name: [] for tensor in self.tensors}
        for group in self.groups:
            for part in group.parts:
                _check_run(part)
                if part.target not in runs:
                    raise PlanError(f"{part.source} goes to {part.target}, which is not planned")
                runs[part.target].append((part.offset, part.offset + part.elements))
        for tensor in self.tensors:
            end = 0
            for begin, stop in sorted(runs[tensor.name]):
                if begin != end:
                    raise PlanError(f"{tensor.name}: elements {end} to {begin} are not filled once")
                end = stop
            if end != tensor.elements:
                raise PlanError(f"{tensor.name}: {end} of {tensor.elements} elements are filled")


def _check_run(part: Part) -> None:
    size, begin = prod(part.shape), part.source_offset
    if begin < 0 or part.elements < 0 or begin + part.elements > size:
        raise PlanError(
            f"{part.target}: elements {begin} to {begin + part.elements} of {part.source}, "
            f"which has {size}"
        )
