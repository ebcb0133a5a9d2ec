"""How transfers are cut and scheduled."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from c2cserve.kernels.gpu.aot.variants import SHARED_BYTES
from c2cserve.kernels.gpu.host_borders import BORDER_BYTES

Order = Literal["direct", "longest"]
"""What a link takes next.

- direct: its own queue first, then relays for the longest other one. Relays that are under way when
  something of its own comes are recalled, and sent again.
- longest: the longest of all queues that it can carry, so that they end together.
"""


class Urgency(IntEnum):
    """The class of a transfer. A link takes the most urgent class first."""

    TOKEN = 0
    """A request waits for its next token until these bytes are there, or gone."""
    LOAD = 1
    """A whole model."""
    KV = 2
    """Copies of KV that are made before anything needs them."""
    LENDING = 3
    """Copies of weights in memory that neighbours lend: one micro-task at a time, of what others
    leave of a link."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How transfers are cut and scheduled. Times are in seconds."""

    task_bytes: int = 4 << 20
    """The smallest micro-task, at the end of a queue that several links carry. All that a link has
    outstanding is half of its share of the queue, within these bounds."""
    task_bytes_most: int = 16 << 20
    """The largest micro-task of a queue that several links carry."""
    alone_bytes: int = 32 << 20
    """The size of micro-tasks of a queue that one link carries: no others wait for their end."""
    peer_bytes: int = 64 << 20
    """The same between two GPUs, whose link is several times as fast as the host's."""
    depth: int = 4
    """Micro-tasks outstanding on a link at a time."""
    one_path_bytes: int = 12 << 20
    """Transfers up to this size take the direct path only, as one copy outside of the queues."""
    batch_bytes: int = 8 << 20
    """Segments of a direct micro-task that are shorter on average are described to the copy engine
    in one call, others in a call each."""
    kernel_in_bytes: int = 0
    """Direct micro-tasks to a GPU are carried by a kernel on the GPU itself, if their segments are
    shorter on average. 0: the copy engine carries all."""
    kernel_out_bytes: int = 0
    """The same for micro-tasks out of a GPU."""
    border_bytes: int = BORDER_BYTES
    """Segments are cut where the address in host memory is a multiple of it. Registrations may meet
    there, and no copy crosses from one into another."""
    order: Order = "direct"
    poll_s: float = 40e-6
    """The time between two polls of the engine's thread, while anything is under way."""
    spin_s: float = 400e-6
    """How long a caller that waits polls without pause, before it sleeps."""
    stall_s: float = 0.05
    """A relay that takes longer is recalled, and its link relays no more for a while."""
    pause_s: float = 1.0
    """How long a link does not relay after its first stall. The time doubles with each stall."""
    rest_s: float = 1e-3
    """How long a link does not relay after bytes of its own: more of them may follow."""
    slow: float = 1.5
    """A micro-task of the last class is slow that takes so many times as long, for each byte, as
    the link's fastest one. After it, the link takes no other for as long as the slow one took:
    other traffic is there."""

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel may carry direct micro-tasks."""
        return self.kernel_in_bytes > 0 or self.kernel_out_bytes > 0

    def __post_init__(self) -> None:
        if min(self.task_bytes, self.alone_bytes, self.peer_bytes, self.depth) < 1:
            raise ValueError("micro-tasks have 1 byte or more, and links a depth of 1 or more")
        if self.task_bytes_most < self.task_bytes:
            raise ValueError("the largest micro-task is no smaller than the smallest")
        if min(self.batch_bytes, self.kernel_in_bytes, self.kernel_out_bytes) < 0:
            raise ValueError("segments have 0 bytes or more")
        if self.border_bytes < 1:
            raise ValueError("there is 1 byte or more between two borders of registrations")
        if self.poll_s <= 0:
            raise ValueError("the engine's thread sleeps between two polls")


STAGES_LEAST, STAGES_MOST = 3, 16
_STATIC_SHARED_BYTES = 1024
"""More than what the kernel has besides its ring."""


@dataclass(frozen=True, slots=True)
class RelayShape:
    """How a relay kernel moves bytes. The neighbour lends that many SMs and so much of their shared
    memory to it. The kernel of small segments has such a shape, too, on the GPU itself."""

    ctas: int = 4
    stages: int = 12
    """Tiles of a CTA that are loaded or stored at a time, by the bulk copy engine."""
    stage_bytes: int = 16 << 10
    recall_poll_bytes: int = 256 << 10
    """What a CTA copies between two looks for a recall."""

    def __post_init__(self) -> None:
        if self.ctas < 1:
            raise ValueError("a relay has 1 CTA or more")
        if not STAGES_LEAST <= self.stages <= STAGES_MOST:
            raise ValueError(f"a relay has {STAGES_LEAST} to {STAGES_MOST} stages")
        if self.stage_bytes < 128 or self.stage_bytes % 128:
            raise ValueError("a stage has a multiple of 128 bytes")
        if self.recall_poll_bytes < 1:
            raise ValueError("a relay looks for a recall after 1 byte or more")
        if self.stages * self.stage_bytes > SHARED_BYTES - _STATIC_SHARED_BYTES:
            raise ValueError(f"{self.stages} stages do not fit into shared memory")
