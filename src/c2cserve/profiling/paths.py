"""What `c2cserve profile` measures of paths between host memory and GPUs, alone and combined."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

from c2cserve.transfer.path_profile import PathProfile, Rates
from c2cserve.transfer.settings import RelayShape, Settings

Way = Literal["in", "out"]
WAYS: tuple[Way, ...] = ("in", "out")
TASKS_MIB = (8, 16, 32)
SMALL_KIB = (64, 256, 1024, 2048)
CTAS = (2, 4, 8)
_ALL = 1 << 40
"""A limit that all segments are shorter than."""
_BETTER = 1.02
"""A kernel takes SMs from steps, so it has to be that much faster than copies."""


class PathRig(Protocol):
    """A machine's GPUs, and memory for transfers of `size` bytes each way."""

    @property
    def name(self) -> str: ...

    @property
    def gpus(self) -> int: ...

    @property
    def size(self) -> int: ...

    def copies_s(self, moves: Sequence[tuple[int, Way]]) -> float:
        """Return the seconds of CUDA's copies of (GPU, way) at the same time."""
        ...

    def engine_s(
        self, links: int, ways: Sequence[Way], settings: Settings, *, segment_bytes: int = 0,
        own: RelayShape | None = None,
    ) -> float:  # fmt: skip
        """Return the seconds of the first GPU's transfers of all ways at the same time, over the
        links of the first GPUs. `segment_bytes`: of separate segments; 0: one segment."""
        ...


def measure_paths(rig: PathRig, *, relays: bool) -> PathProfile:
    """Measure links, and paths over several of them if there are and `relays` says so."""
    size, base = rig.size, Settings(one_path_bytes=0)
    alone = tuple(
        Rates(
            size / rig.copies_s([(gpu, "in")]), size / rig.copies_s([(gpu, "out")]),
            2 * size / rig.copies_s([(gpu, "in"), (gpu, "out")]),
        )
        for gpu in range(rig.gpus)
    )  # fmt: skip
    at_once = tuple(
        count * size / rig.copies_s([(gpu, "in") for gpu in range(count)])
        for count in range(2, rig.gpus + 1)
    )
    task_bytes, combined = base.task_bytes_most, tuple[Rates, ...]()
    if relays and rig.gpus > 1:
        task_bytes = min(
            (mib << 20 for mib in TASKS_MIB),
            key=lambda most: rig.engine_s(2, ["in"], replace(base, task_bytes_most=most)),
        )
        tuned = replace(base, task_bytes_most=task_bytes)
        combined = tuple(_over(rig, count, tuned) for count in range(2, rig.gpus + 1))
    ctas, kernel_in, kernel_out = _small(rig, base)
    now = datetime.datetime.now(datetime.UTC)
    return PathProfile(
        rig.name, now, alone, at_once, combined, task_bytes, kernel_in, kernel_out, ctas
    )


def _over(rig: PathRig, links: int, settings: Settings) -> Rates:
    into, out, both = (
        len(ways) * rig.size / rig.engine_s(links, ways, settings)
        for ways in (WAYS[:1], WAYS[1:], WAYS)
    )
    return Rates(into, out, both)


def _small(rig: PathRig, base: Settings) -> tuple[int, int, int]:
    """Return the CTAs of the kernel, and the sizes below which it carries segments in and out.
    They end at the first one at which it is not faster. Both ways are at work, as in a rotation of
    KV."""

    def seconds(kib: int, ways: Sequence[Way], ctas: int) -> float:
        limits = {f"kernel_{way}_bytes": _ALL for way in ways}
        return rig.engine_s(
            1, WAYS, replace(base, **limits), segment_bytes=kib << 10, own=RelayShape(ctas)
        )

    ctas = min(CTAS, key=lambda one: seconds(SMALL_KIB[0], WAYS, one))
    found: dict[Way, int] = {"in": 0, "out": 0}
    rising = set(WAYS)
    for kib in SMALL_KIB:
        cases: list[tuple[Way, ...]] = [WAYS, ("in",), ("out",)]
        times = {ways: seconds(kib, ways, ctas) for ways in cases}
        best = min(times, key=lambda ways: times[ways])
        if times[best] * _BETTER > seconds(kib, (), ctas):
            break
        rising &= set(best)
        for way in rising:
            found[way] = (kib << 10) + 1
    return ctas, found["in"], found["out"]
