"""Which models are in the host pool: what is asked for, then what fits (host memory is home)."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from c2cserve.core.backoff import back_off_s
from c2cserve.core.events import ModelUsable, ModelUsed, ModelWanted
from c2cserve.core.model import ModelSpec
from c2cserve.policy.cluster.queue import Urgency
from c2cserve.policy.uses import Uses

_RETRY_FIRST_S = 5.0
_RETRY_MOST_S = 60.0
_UNASKED_LOADS_MAX = 2
"""Loads at a time that no request waits for: one that is asked for must not queue behind many."""


Unused = tuple[tuple[bool, float], float, str, "ModelBook"]
"""A model that may leave the pool, and by what it is compared with others."""


@dataclass(slots=True, eq=False)
class ModelBook:
    """What the controller's policy keeps of a catalogue model."""

    spec: ModelSpec
    replaces: str = ""
    """The version whose place it takes once it is loaded."""
    in_pool: bool = False
    """Loading or loaded: its memory is taken."""
    usable: bool = False
    held: bool = False
    """It is to be loaded although no request waits for it here: the fleet's policy says so."""
    loaded: bool = False
    closing: bool = False
    """It takes no new requests, because it is to leave the pool for another one (`pool.turns`)."""
    load_began_s: float = float("-inf")
    serves_since_s: float = float("-inf")
    """When it became usable, or was opened again. Who waits for longer has waited for the pool."""
    stays_until_s: float = float("-inf")
    """When it may be closed for another one."""
    removing: bool = False
    running: int = 0
    """Requests dispatched."""
    last_used_s: float = float("-inf")
    uses: Uses = field(init=False)
    asks: Uses = field(default_factory=lambda: Uses(0.0))
    """Its requests, also those that were refused."""
    slice_id: str = ""
    """Where its last request was sent."""
    failures: int = 0
    """Loads failed in a row."""
    retry_s: float | None = None
    """When the next load may be tried, after a failure."""
    error: str = ""

    def __post_init__(self) -> None:
        self.uses = Uses.of(self.spec.weight_bytes)

    @property
    def wanted(self) -> bool:
        """Whether it is to be loaded although no request waits for it: it replaces another
        version, or the fleet's policy wants it."""
        fresh = not self.in_pool and not self.failures and not self.removing
        return (bool(self.replaces) or self.held) and fresh

    @property
    def serving(self) -> bool:
        """Whether new requests may be sent to slices."""
        return self.usable and not self.closing

    @property
    def warm_until_s(self) -> float:
        """The time by which models on a slice are compared: the least recent one leaves first."""
        return self.last_used_s + self.spec.keep_warm_s

    @property
    def value(self) -> tuple[float, ...]:
        """What it costs to let it leave a slice, as far as the model goes; lowest first."""
        return self.spec.pinned, self.spec.priority, self.warm_until_s

    @property
    def unloadable(self) -> str:
        """Why its requests fail after a load that failed."""
        return f"{self.spec.name} cannot be loaded: {self.error}"

    def keep_value(self, now: float) -> tuple[bool, float]:
        """Return what it is worth to the pool, lowest first: `keep_warm_s`, then how often it is
        used. A load takes as long as the model is large, so its size does not matter."""
        return now < self.warm_until_s, self.uses.per_s(now)

    def used(self, now: float) -> None:
        self.last_used_s = now
        self.uses.note(now)

    def note(self, event: ModelUsable | ModelWanted | ModelUsed) -> None:
        if isinstance(event, ModelUsable):
            self.usable = True
        elif isinstance(event, ModelUsed):
            self.uses.recall(event.times_s)
        else:
            self.held = not self.in_pool
            if event.pinned:
                self.spec = replace(self.spec, pinned=True)

    def arrived(self) -> None:
        """Note that all of it is in the pool."""
        self.loaded, self.held = True, False
        self.failures, self.retry_s = 0, None

    def failed(self, now: float) -> None:
        """Back off: a file that is broken now is likely to be broken in a second."""
        self.held = False
        self.retry_s = now + back_off_s(self.failures, _RETRY_FIRST_S, _RETRY_MOST_S)
        self.failures += 1

    def may_load(self, now: float) -> bool:
        return not self.in_pool and (self.retry_s is None or now >= self.retry_s)


class PoolBooks:
    """Which models are outside of the pool, and how full it is."""

    def __init__(self) -> None:
        self.budget_bytes: int | None = None
        """None: it is not known yet."""
        self.used_bytes = 0
        self.least_bytes = 1 << 62
        """No model was smaller than that."""
        self.outside: dict[str, ModelBook] = {}
        self._urged: dict[str, None] = {}
        """Those of all models that may be `wanted`."""
        self._loading: dict[str, ModelBook] = {}
        """Those of which the load has not ended."""

    def added(self, model: ModelBook) -> None:
        """Note a new model, in the pool or not."""
        size = model.spec.weight_bytes
        self.least_bytes = min(self.least_bytes, size)
        if model.in_pool:
            self.used_bytes += size
        else:
            self.outside[model.spec.id] = model
        self.noted(model)

    def noted(self, model: ModelBook) -> None:
        """Note that it may be `wanted` from now on, or not any more."""
        if model.replaces or model.held:
            self._urged[model.spec.id] = None

    def wanted(self) -> list[ModelBook]:
        """Return the models outside that are `wanted`."""
        here = [self.outside[name] for name in self._urged if name in self.outside]
        return [model for model in here if model.wanted]

    def entered(self, model: ModelBook, now: float) -> None:
        """Note that the memory of a model outside is taken, and its load begins."""
        model.in_pool, model.load_began_s = True, now
        self._loading[model.spec.id] = model
        self.used_bytes += model.spec.weight_bytes
        del self.outside[model.spec.id]

    def refresh(self, now: float) -> None:
        """Note which models became usable, and which loads have ended: a model stays for as long
        as its load took."""
        for model in list(self._loading.values()):
            if model.usable and model.serves_since_s < model.load_began_s:
                model.serves_since_s = now
            if model.loaded:
                model.stays_until_s = now + (now - model.load_began_s)
                del self._loading[model.spec.id]

    def left(self, model: ModelBook) -> None:
        self.used_bytes -= model.spec.weight_bytes if model.in_pool else 0
        model.in_pool = model.usable = model.loaded = model.closing = False
        self._loading.pop(model.spec.id, None)
        self.outside[model.spec.id] = model

    def forget(self, name: str) -> None:
        """Forget a model outside."""
        del self.outside[name]
        self._urged.pop(name, None)


def impossible(
    absent: Iterable[ModelBook], models: Iterable[ModelBook], budget_bytes: int
) -> Iterator[tuple[str, str]]:
    """Yield which of these can never enter the pool beside the pinned models, and why."""
    specs = [model.spec for model in absent]
    if not specs:
        return
    # Of two versions of a pinned model only one stays.
    pinned = [
        m.spec for m in models
        if m.spec.pinned and not (m.removing or (m.replaces and m.wanted))
    ]  # fmt: skip
    for spec in specs:
        others = sum(one.weight_bytes for one in pinned if one.name != spec.name)
        if spec.weight_bytes + others > budget_bytes:
            beside = f" and pinned models keep {others}" if others else ""
            yield spec.id, (f"{spec.name} takes {spec.weight_bytes} bytes of host memory; "
                            f"the pool's budget is {budget_bytes}{beside}")  # fmt: skip


def unwaited(
    wanted: Iterable[ModelBook], waiting: Collection[str], now: float
) -> Iterator[tuple[Urgency, str]]:
    """The `wanted` models without requests, before all that have some. They count as used now:
    what is about to answer must not be evicted for not having answered yet."""
    for model in wanted:
        if model.spec.id not in waiting:
            model.last_used_s = now
            model.uses.begin(now)
            yield (False, float("-inf"), ""), model.spec.id


def evictable(models: Iterable[ModelBook], waiting: Collection[str], now: float) -> list[Unused]:
    """Return the models that may leave the pool, as a heap: least often used first. None of them is
    pinned, still loading, in use (with requests running or in `waiting`), or leaves for another."""
    may_leave = (
        m for m in models
        if m.loaded and not (m.running or m.closing or m.spec.pinned or m.spec.id in waiting)
    )  # fmt: skip
    return unused_of(may_leave, now)


def unused_of(models: Iterable[ModelBook], now: float) -> list[Unused]:
    """Return models as a heap: least often used first."""
    unused = [(m.keep_value(now), m.last_used_s, m.spec.id, m) for m in models]
    heapify(unused)
    return unused


def evictions(unused: list[Unused], lacking: int) -> list[ModelBook] | None:
    """Take the models to evict for so many bytes from the `evictable` ones, none in vain. None:
    there are not enough."""
    if sum([one[-1].spec.weight_bytes for one in unused]) < lacking:
        return None
    victims: list[Unused] = []
    while lacking > 0:
        one = heappop(unused)
        victims.append(one)
        lacking -= one[-1].spec.weight_bytes
    for one in reversed(victims[:]):
        if lacking + one[-1].spec.weight_bytes <= 0:
            victims.remove(one)
            heappush(unused, one)
            lacking += one[-1].spec.weight_bytes
    return [one[-1] for one in victims]


def unasked_loads(
    outside: Iterable[ModelBook], models: Collection[ModelBook], free_bytes: int
) -> list[ModelBook]:
    """Return what to load although no request asks for it, while there is room: pinned, then by
    priority. `outside`: those of the models that are not in the pool."""
    cold = [
        m for m in outside
        if m.spec.weight_bytes <= free_bytes and not m.removing and not m.failures
    ]  # fmt: skip
    if not cold:
        return []
    loading = sum(model.in_pool and not model.loaded for model in models)
    chosen: list[ModelBook] = []
    for model in sorted(cold, key=lambda m: (not m.spec.pinned, -m.spec.priority, m.spec.id)):
        if loading + len(chosen) < _UNASKED_LOADS_MAX and model.spec.weight_bytes <= free_bytes:
            chosen.append(model)
            free_bytes -= model.spec.weight_bytes
    return chosen
