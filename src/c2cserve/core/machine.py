"""What a machine is made of, as policies and reports see it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

SliceKind = Literal["cpu", "gpu", "green", "mig"]


ProfileChoice = Literal["measured", "assumed"]
"""What dataflows are picked by: this machine's profile, or known rates of the nearest GPU."""

_ACTIVE = 8
_ACTIVE_WITH_LINK = 256


def most_active(kind: SliceKind) -> int:
    """Return how many models a server has active on a slice. To deactivate one gives up its weights
    in the slice's memory. So on GPUs memory is the limit, and this is only a bound for the work of
    policies. CPU slices read weights where they are: what counts is the round of their steps."""
    return _ACTIVE if kind == "cpu" else _ACTIVE_WITH_LINK


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What a GPU slice has of a GPU or of a MIG instance. It is all of it, or one of `parts` equal
    partitions of its SMs, numbered from 0."""

    uuid: str
    """The driver's name for it."""
    sms: int
    """SMs of the GPU or the partition; 0 when the driver does not tell."""
    part: int = 0
    parts: int = 0
    """0: it is not partitioned."""
    profile: ProfileChoice = "measured"
    lenders: tuple[str, ...] = ()
    """The driver's names of GPUs that lend memory to it, for copies of weights."""
    lent_bytes: int = 0
    """Bytes that each of them lends; all slices of a GPU share them."""
    neighbours: tuple[str, ...] = ()
    """The driver's names of GPUs with slices that lend it their links, as it lends them its own."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One lane of compute with its own KV budget. `kv_bytes` is a multiple of `slab_bytes`."""

    id: str
    kind: SliceKind
    cpus: tuple[int, ...] = ()
    numa: int = 0
    kv_bytes: int = 256 << 20
    slab_bytes: int = 2 << 20
    max_batch: int = 64
    """Sequences in one step."""
    max_step_tokens: int = 512
    """Prefill tokens in one step (the largest chunk)."""
    max_active: int = 8
    """Models that may be active here: with requests, or with weights and prefixes kept for the next
    ones. `most_active` is what a server has."""
    gpu: GpuShare | None = None
    """None: a CPU slice."""
    hbm_bytes: int = 0
    """Memory of the slice for weights and KV together; 0: only `kv_bytes` is known."""
    link: str = ""
    """Id of the link that weights stream over; slices that share a link name the same one."""
    link_bytes_per_s: float = 0.0
    """The slice's share of that link; 0: weights lie in its own memory, as on CPUs."""
    relayed_bytes_per_s: float = 0.0
    """What its neighbours' links carry for its loads besides, while they are idle."""
    lanes: int = 1
    """2: steps whose weights stream run beside the others, in a lane of their own (`step.Lane`)."""
    host_kv_bytes: int = 0
    """Host memory for KV of requests that are paused here; 0: nothing is rotated."""

    @property
    def load_bytes_per_s(self) -> float:
        """Return how fast one whole model is loaded while no neighbour needs its link. Weights that
        stream have the slice's own share of its link only."""
        return self.link_bytes_per_s + self.relayed_bytes_per_s

    @property
    def swaps_weights(self) -> bool:
        """Whether weights of models are loaded into its memory and dropped by policy: both the
        memory and the link to it are known."""
        return self.hbm_bytes > 0 and self.link_bytes_per_s > 0.0

    def __post_init__(self) -> None:
        if self.slab_bytes < 1 or self.kv_bytes < self.slab_bytes:
            raise ValueError(f"slice {self.id}: the KV arena must hold at least one slab")
        if (self.kind == "cpu") != (self.gpu is None):
            raise ValueError(f"slice {self.id}: kind {self.kind} with gpu {self.gpu}")
        if self.lanes not in (1, 2) or (self.lanes == 2 and self.gpu is None):
            raise ValueError(f"slice {self.id}: kind {self.kind} with {self.lanes} lanes")


@dataclass(frozen=True, slots=True)
class Link:
    """A path bytes move on, with its measured bandwidth in one direction."""

    id: str
    source: str
    target: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """Links that share a part of their path: together they carry no more than that does."""

    id: str
    links: tuple[str, ...]
    bytes_per_s: float


def combined_rates(
    links: Iterable[Link], groups: Iterable[LinkGroup], used: Iterable[str]
) -> dict[str, float]:
    """Return what each of the used links carries while all of them are at work, by its id.

    Of two groups, one has all links of the other, or none. What links share counts once. Raises
    KeyError for a link that is not there."""
    known = {link.id: link.bytes_per_s for link in links}
    rates = {name: known[name] for name in used}
    for group in sorted(groups, key=lambda one: len(one.links)):
        members = [name for name in group.links if name in rates]
        together = sum(rates[name] for name in members)
        if together > group.bytes_per_s:
            for name in members:
                rates[name] *= group.bytes_per_s / together
    return rates


def relayed_bytes_per_s(
    links: Iterable[Link], groups: Iterable[LinkGroup], own: str, neighbours: Iterable[str]
) -> float:
    """Return what the links of idle neighbours add to a GPU's own link, in bytes per second.

    Raises KeyError for a link that is not there."""
    links, groups = tuple(links), tuple(groups)
    every = combined_rates(links, groups, (own, *neighbours))
    alone = combined_rates(links, groups, (own,))
    return max(0.0, sum(every.values()) - sum(alone.values()))


@dataclass(frozen=True, slots=True)
class NumaNode:
    id: int
    cpus: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    id: int
    uuid: str
    name: str
    memory_bytes: int
    sms: int = 0
    mig: bool = False
    memory_free_bytes: int = 0
    readable: tuple[str, ...] = ()
    """Names (`uuid`) of other GPUs whose memory it can read."""


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine as `devices` found it."""

    cpu_name: str
    cpus: tuple[int, ...]
    memory_bytes: int
    memory_available_bytes: int
    shm_bytes: int
    isa: tuple[str, ...]
    numa: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = field(default=())
    groups: tuple[LinkGroup, ...] = ()
    """What links share. Of two groups, one has all links of the other, or none."""
    cores: tuple[tuple[int, ...], ...] = ()
    """Allowed hardware threads by physical core; threads of one core share its units."""
    cpu_quota: float | None = None
    """CPU seconds per second a cgroup allows; None: no limit."""
    shm_free_bytes: int = 0

    def combined_bytes_per_s(self, links: Iterable[str]) -> float:
        """Return what these links carry at the same time, each in the same direction.

        What they share counts once. Raises KeyError for a link that is not there."""
        return sum(combined_rates(self.links, self.groups, links).values())
