"""Which requests have their KV in HBM, and which wait with it in host memory (SuperInfer 4.2, 4.3).

*Virtual lag time* says how far a request is behind or ahead (section 4.2.2, three cases):

    paused    alpha * max(0, now - t_last - beta_B * TPOT_SLO)
    waiting           max(0, now - t_arr  - beta_F * TTFT_SLO)
    running         -(now - t_run)

(The paper's text calls S_B the TTFT and S_F the TBT target. Its formula, figures and advice on beta
only make sense the other way round.) `rotate` is its Algorithm 1, largest lag first.

Ours (`RotationSettings.paced`) measures a request that has begun against its pace. It has a token
every TBT_SLO from its first one on:

    paused    alpha * (now - due of the next token)
    running     min(0, now - due of the next token)

So a request that ran faster than its client reads is away until its client has caught up. Measured
from its last token, each is due again at once, and most of the link's time goes into exchanges."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from c2cserve.core.request import Slo
from c2cserve.core.value import value


@dataclass(frozen=True, slots=True)
class RotationSettings:
    """Section 4.2.2's weights, and B_xfer: KV that may change places per iteration. The paper's
    values (section 5.2); its B_xfer of 2400 blocks of 4 MiB is what its link moves in 55 ms."""

    alpha: float = 3.0
    beta_b: float = 0.0
    beta_f: float = 0.5
    transfer_bytes: int = 2400 * (4 << 20)
    paced: bool = False
    """Requests that have begun are measured against their pace, and only one that is due makes
    another leave. B_xfer is what the link moves in a step, if that is less (`step_transfer`)."""


AHEAD_SHARE = 0.5
"""The share of host memory that copies of running requests may have beside cached prefixes, and
beside KV that has left HBM."""
PACED = RotationSettings(paced=True)
"""What our own policy rotates by."""


class KvState(Enum):
    RUNNING = "running"
    WAITING = "waiting"
    """Not started: has no KV."""
    PAUSED = "paused"
    """Paused, its KV in host memory."""


@value
class KvClaim:
    """A request that holds HBM or wants to. `kv_bytes`: what it holds (running) or needs to go on.
    `since_s`: t_run, when it began to run; t_arr, its arrival; or t_last, its last token."""

    id: str
    state: KvState
    kv_bytes: int
    since_s: float
    slo: Slo
    due_s: float = 0.0
    """When its next token is due at its pace. Read if `paced`."""


@value
class Rotation:
    """The requests that leave HBM, the longest run first; and those that come in, the largest lag
    first."""

    preempted: tuple[str, ...]
    prioritized: tuple[str, ...]


def lag_s(claim: KvClaim, settings: RotationSettings, now: float) -> float:
    """Return the virtual lag time, seconds."""
    passed_s = now - claim.since_s
    if settings.paced and claim.state is KvState.RUNNING:
        return min(0.0, now - claim.due_s) if passed_s > 0.0 else 0.0
    if settings.paced and claim.state is KvState.PAUSED:
        return settings.alpha * (now - claim.due_s)
    match claim.state:
        case KvState.RUNNING:
            return -passed_s
        case KvState.WAITING:
            return max(0.0, passed_s - settings.beta_f * claim.slo.ttft_s)
        case KvState.PAUSED:
            return settings.alpha * max(0.0, passed_s - settings.beta_b * claim.slo.tpot_s)


def step_transfer(
    claims: Iterable[KvClaim], settings: RotationSettings, link_bytes: int, coming_bytes: int,
    now: float,
) -> int:  # fmt: skip
    """Return B_xfer of an iteration: what the link moves in it (`link_bytes`), less what is coming
    in already. If nothing is, it suffices for the request with the largest lag: else one that is
    larger than that would never come in. The paper's is an upper bound."""
    most = min(settings.transfer_bytes, link_bytes)
    if coming_bytes:
        return max(0, most - coming_bytes)
    wanting = [one for one in claims if one.state is not KvState.RUNNING]
    first = max(wanting, key=lambda one: lag_s(one, settings, now), default=None)
    return most if first is None else max(most, first.kv_bytes)


def rotate(
    claims: Iterable[KvClaim], free_bytes: int, settings: RotationSettings, now: float
) -> Rotation:
    """Run SuperInfer's Algorithm 1 for one iteration; `free_bytes` is B_HBM. Without contention all
    requests come in, first come first served. The paper leaves two things open. A request that
    began to run in this very moment (lag 0) is neither prioritized again nor preempted. B_xfer
    counts only as far as there are requests to preempt. So a prioritized request always has room:
    sum of kv_bytes of `prioritized` <= free_bytes + that of `preempted`. Ties go to the smaller
    id."""
    everybody = list(claims)
    running = [t for t in everybody if t.state is KvState.RUNNING]
    wanting = [t for t in everybody if t.state is not KvState.RUNNING]
    if sum(t.kv_bytes for t in wanting) <= free_bytes:  # step 1: no contention
        wanting.sort(key=lambda t: (t.since_s, t.id))
        return Rotation((), tuple(t.id for t in wanting))
    lags = {t.id: lag_s(t, settings, now) for t in everybody}  # step 2
    leavers = [t for t in running if lags[t.id] < 0.0]
    leavers.sort(key=lambda t: (lags[t.id], t.id))
    wanting.sort(key=lambda t: (-lags[t.id], t.since_s, t.id))
    vacated = min(settings.transfer_bytes, sum(t.kv_bytes for t in leavers))
    left = free_bytes + vacated
    prioritized: list[str] = []  # step 3
    extra = -free_bytes
    for claim in wanting:
        due = lags[claim.id] > 0.0 or not settings.paced
        if claim.kv_bytes <= left - (0 if due else vacated):
            prioritized.append(claim.id)
            left -= claim.kv_bytes
            extra += claim.kv_bytes
    preempted: list[str] = []  # step 4
    for claim in leavers:
        if extra <= 0:
            break
        preempted.append(claim.id)
        extra -= claim.kv_bytes
    return Rotation(tuple(preempted), tuple(prioritized))


@dataclass(slots=True)
class _Copies:
    full: int = 0
    """Blocks that are written to their end. They do not change any more."""
    synced: int = 0
    """How many of these, from the first on, have a copy in host memory."""
    shared: int = 0
    """How many of the copies, from the first on, are those of a cached prefix."""
    moving: int = 0
    """Blocks after the synced ones that are on their way there."""


class EagerCopies:
    """Which blocks of which request have a copy in host memory (section 4.3.2, eager block
    rotation). Counts suffice: KV fills block by block, so copies are a prefix of it. The first may
    be those of a cached prefix (ours), which take no room here.

    Full blocks are copied in the background before their place is needed. A request that is rotated
    out then moves only what is *dirty*; the HBM of *synced* blocks is free at once. So what comes
    in never waits for what goes out, and both directions of the link are in use."""

    __slots__ = ("_copies", "capacity_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._copies: dict[str, _Copies] = {}

    def synced(self, request_id: str) -> int:
        return self._copies[request_id].synced if request_id in self._copies else 0

    def lasting(self, request_id: str) -> int:
        """Return how many of its copies, from the first on, stay valid when it goes on."""
        copies = self._copies[request_id]
        return min(copies.synced, copies.full)

    def shared(self, request_id: str) -> int:
        return self._copies[request_id].shared if request_id in self._copies else 0

    def has_own(self, request_id: str) -> bool:
        """Return whether it has copies that are no cached prefix's, or gets some."""
        copies = self._copies.get(request_id)
        return copies is not None and copies.synced + copies.moving > copies.shared

    def share(self, request_id: str, blocks: int) -> None:
        """Note that a cached prefix has copies of its first `blocks` blocks, which are full. It has
        none of its own."""
        copies = self._copies.setdefault(request_id, _Copies())
        copies.synced = copies.shared = copies.full = blocks

    def filled(self, request_id: str, blocks: int) -> None:
        """Note that the request's first `blocks` blocks are full now."""
        self._copies.setdefault(request_id, _Copies()).full = blocks

    def start(self, request_id: str, block_bytes: int, most: int) -> tuple[int, int]:
        """Copy full blocks in the background. Return (first, count) of those to move now, at most
        `most` and no more than host memory has room for. The count is 0 if a move of the request is
        under way, or nothing is to be done."""
        copies = self._copies.get(request_id)
        if copies is None or copies.moving:
            return 0, 0
        room = (self.capacity_bytes - self.used_bytes) // block_bytes
        copies.moving = max(0, min(copies.full - copies.synced, most, room))
        self.used_bytes += copies.moving * block_bytes
        return copies.synced, copies.moving

    def rotate_out(self, request_id: str, held: int, block_bytes: int) -> tuple[int, int] | None:
        """Take the request out of HBM. Return (first, count) of the blocks still to be moved, the
        dirty ones of `held`. None: host memory has no room for them, or a move of it is under
        way."""
        copies = self._copies.setdefault(request_id, _Copies())
        dirty = held - copies.synced
        if copies.moving or self.used_bytes + dirty * block_bytes > self.capacity_bytes:
            return None
        copies.moving = dirty
        self.used_bytes += dirty * block_bytes
        return copies.synced, dirty

    def moved(self, request_id: str) -> None:
        """Note that the blocks of `start` or `rotate_out` have arrived in host memory."""
        copies = self._copies.get(request_id)
        if copies is not None:
            copies.synced += copies.moving
            copies.moving = 0

    def resumed(self, request_id: str, block_bytes: int) -> None:
        """Its KV is in HBM again and grows: copies of full blocks stay valid, that of the last,
        partly filled one will not."""
        lasting = self.lasting(request_id)
        copies = self._copies[request_id]
        self.used_bytes -= (copies.synced - lasting) * block_bytes
        copies.synced = lasting

    def forget(self, request_id: str, block_bytes: int) -> None:
        """Forget a request that ended, or whose KV is not wanted any more."""
        copies = self._copies.pop(request_id, None)
        if copies is not None:
            self.used_bytes -= (copies.synced + copies.moving - copies.shared) * block_bytes
