"""Which slice takes a request: an active instance with room, else an idle slice, else wherever it
can still be in time, making the least valuable model leave a slice that is full of them.

A first form of C2CServe section 6.2, where links are not yet the limit, with the shadow validation
of SLINFER section 6 C in closed form: step times are few enough numbers to add up.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from c2cserve.core.machine import Slice
from c2cserve.core.request import Request

_OVERESTIMATE = 1.1
"""SLINFER section 6 C: what times are multiplied with before they are believed."""
_ROOMY = 0.5
"""An instance is preferred to an idle slice while its times stay below this share of the targets.
Above, an idle slice serves sooner, and what is believed about time is rough."""

Value = Callable[[str], tuple[float, ...]]
"""Orders models by what it costs to let them leave a slice, lowest first."""


@dataclass(slots=True, eq=False)
class Instance:
    """A model active on a slice."""

    running: dict[str, int] = field(default_factory=dict[str, int])
    """Requests dispatched here -> prompt tokens still to be computed (0 from the first token)."""
    pending_tokens: int = 0
    tpot_s: float = float("inf")
    """The strictest of its requests' targets since it was last empty."""


@dataclass(slots=True, eq=False)
class SliceLoad:
    slice: Slice
    active: dict[str, Instance] = field(default_factory=dict[str, Instance])
    requests: int = 0
    unused: int = 0
    """Active models without requests."""
    decode_s: dict[str, float] = field(default_factory=dict[str, float])
    """Model -> lately measured seconds of a decode step here; likewise per prefill token."""
    prefill_token_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def open(self) -> bool:
        """More requests can be dispatched here. What waits at the controller can still go to any
        slice, so a slice gets no more than keeps it busy."""
        return self.requests < 2 * self.slice.max_batch

    @property
    def instance_limit(self) -> int:
        """A full batch and what follows at once; the rest of the slice is for other models."""
        return self.slice.max_batch + self.slice.max_batch // 4

    def activate(self, model: str) -> None:
        self.active[model] = Instance()
        self.unused += 1

    def deactivate(self, model: str) -> bool:
        """A model without requests; False if it is not active here."""
        if model not in self.active:
            return False
        assert not self.active.pop(model).running
        self.unused -= 1
        return True

    def add(self, request: Request) -> None:
        instance = self.active[request.model]
        self.unused -= not instance.running
        instance.running[request.id] = request.prompt_len
        instance.pending_tokens += request.prompt_len
        instance.tpot_s = min(instance.tpot_s, request.slo.tpot_s)
        self.requests += 1

    def first_token(self, model: str, request_id: str) -> None:
        instance = self.active[model]
        instance.pending_tokens -= instance.running[request_id]
        instance.running[request_id] = 0

    def remove(self, model: str, request_id: str) -> None:
        self.first_token(model, request_id)
        instance = self.active[model]
        del instance.running[request_id]
        self.requests -= 1
        if not instance.running:
            instance.tpot_s = float("inf")
            self.unused += 1

    def in_time(self, request: Request, now: float, share: float) -> bool:
        """Would the request get its first token within `share` of the time it has left, and would
        a decode step of every model here stay within that share of everybody's TPOT? (SLINFER
        figure 15: cases 1, and 2 with 3.) False if some time is not known yet."""
        if not self.requests:
            return True
        first_s = round_s = 0.0
        tpot_s = request.slo.tpot_s
        for name, instance in self.active.items():
            joins = name == request.model
            if not joins and not instance.running:
                continue
            tokens = instance.pending_tokens + (request.prompt_len if joins else 0)
            decode_s = self.decode_s.get(name, 0.0)
            token_s = self.prefill_token_s.get(name, 0.0)
            if decode_s <= 0.0 or token_s <= 0.0:
                return False
            first_s += tokens * token_s
            round_s += decode_s
            tpot_s = min(tpot_s, instance.tpot_s)
        left_s = request.first_token_due_s - now
        return (
            _OVERESTIMATE * (first_s + round_s) <= share * left_s
            and _OVERESTIMATE * round_s <= share * tpot_s
        )


@dataclass(frozen=True, slots=True)
class Placement:
    slice_id: str
    activate: bool = False
    deactivate: str | None = None


def active_if_full(loads: Sequence[SliceLoad]) -> set[str] | None:
    """The only models that may get a place if no slice takes another one; None: some slice does."""
    if any(len(load.active) < load.slice.max_active or load.unused for load in loads):
        return None
    return {name for load in loads for name in load.active}


def place(
    request: Request, loads: Iterable[SliceLoad], value: Value, now: float
) -> Placement | None:
    """Where the request should go, of open slices; None: nowhere now. A model with requests on a
    slice is never made to leave it."""
    model = request.model
    here: list[SliceLoad] = []
    others: list[SliceLoad] = []
    for load in loads:
        instance = load.active.get(model)
        if instance is None:
            others.append(load)
        elif len(instance.running) < load.instance_limit:
            here.append(load)
    # Largest batch first: it uses the weights best, and lets small batches run dry (section 8).
    here.sort(key=lambda x: (-len(x.active[model].running), x.requests, x.slice.id))
    roomy = next((load for load in here if load.in_time(request, now, _ROOMY)), None)
    if roomy is not None:
        return Placement(roomy.slice.id)
    moves = [move for load in others if (move := _activation(load, value)) is not None]
    idle = [move for move in moves if not move[0].requests]
    if idle:
        load, leaving, _ = min(idle, key=lambda m: (m[2], len(m[0].active), m[0].slice.id))
        return Placement(load.slice.id, True, leaving)
    in_time = next((load for load in here if load.in_time(request, now, 1.0)), None)
    if in_time is not None:
        return Placement(in_time.slice.id)
    # Busy everywhere, or late already: wherever least is to be done.
    choices = [(load.requests, False, (), load.slice.id, None) for load in here]
    choices += [(load.requests, True, cost, load.slice.id, out) for load, out, cost in moves]
    if not choices:
        return None
    _, activate, _, slice_id, leaving = min(choices, key=lambda c: c[:4])
    return Placement(slice_id, activate, leaving)


def _activation(
    load: SliceLoad, value: Value
) -> tuple[SliceLoad, str | None, tuple[float, ...]] | None:
    """One more model on the slice: who leaves for it, and what that costs."""
    if len(load.active) < load.slice.max_active:
        return load, None, ()
    if not load.unused:
        return None
    unused = [name for name, instance in load.active.items() if not instance.running]
    victim = min(unused, key=lambda name: (value(name), name))
    return load, victim, value(victim)
