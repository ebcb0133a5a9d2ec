"""Which models' weights lie in a slice's memory: the interface, and the simplest answer."""

from collections.abc import Collection, Sequence

from c2cserve.core.actions import Fetch, Release
from c2cserve.core.model import ModelSpec
from c2cserve.policy.headroom import Candidate, next_turn
from c2cserve.policy.slice.batching import ActiveModel
from c2cserve.policy.slice.kv import KvArena


class WeightMemory:
    """Decides which models' weights lie in the slice's memory, beside KV. Here no model's do: steps
    read weights where they lie, and the executor may cache them."""

    plans = False
    """Whether `plan` ever returns something."""
    wakeup: float | None = None
    """When `plan` has to be asked again, in clock seconds."""

    def __init__(self, arena: KvArena) -> None:
        self._arena = arena

    def computes(self, name: str) -> bool:
        """Return whether steps of the model find their weights now."""
        return True

    def streams(self, name: str) -> bool | None:
        """Return whether the model's next step reads its weights over a link. None: not known."""
        return None

    @property
    def needed_bytes(self) -> int:
        """The bytes of the arena that weights of models with requests take, or will once loaded."""
        return 0

    def capacity(self, model: ActiveModel) -> int:
        """Return the blocks of KV that the model could have at most."""
        return self._arena.capacity(model.key)

    @property
    def turns(self) -> int:
        """The turns of models that have begun, where they are counted."""
        return 0

    def opened(self, model: ActiveModel, spec: ModelSpec) -> None:
        """Note that the model is active on the slice."""

    def activated(self, model: ActiveModel, spec: ModelSpec) -> None:
        """Note that the model's weights are to be resident as a whole (`events.Activated.keep`)."""
        raise AssertionError(f"{spec.id}: this slice keeps no weights as a whole")

    def ended(self, model: ActiveModel) -> Sequence[Release]:
        """Forget a deactivated model, whose last step has ended. Return what releases its
        weights."""
        return ()

    def fetched(self, name: str, took_s: float) -> None: ...

    def refused(self, name: str) -> None:
        """Note that the weights are not resident: they found no place, or KV has taken it."""

    def requested(self, name: str, now: float) -> None:
        """Note that a request for the model has arrived."""

    def plan(self, now: float, in_flight: dict[str, float]) -> Sequence[Fetch | Release]:
        """Return loads to begin and weights to release. `in_flight`: models with steps under way,
        whose weights must stay, and in how many seconds these are expected to end."""
        return ()

    def turn(
        self, candidates: Sequence[Candidate[str]], now: float, late_ran: bool
    ) -> tuple[bool, str] | None:
        """Return which model runs next, as `headroom.next_turn` does."""
        return next_turn(candidates, now, late_ran)

    def make_room(
        self, model: ActiveModel, in_flight: Collection[str], now: float
    ) -> Sequence[Fetch | Release]:
        """Release weights of other models for KV of this one. Empty: none can go."""
        return ()

    def break_deadlock(self) -> Sequence[Fetch | Release]:
        """Load a model that waits, because nothing is in flight and nothing could be launched."""
        return ()
