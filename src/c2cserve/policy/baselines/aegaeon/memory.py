"""Weights on a slice whose models take Aegaeon's turns."""

from collections.abc import Collection, Mapping, Sequence

from c2cserve.core.actions import Fetch, Release
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.policy.baselines.aegaeon.turns import Turns
from c2cserve.policy.headroom import Candidate
from c2cserve.policy.slice.batching import ActiveModel
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.weights.model_weights import ModelWeights
from c2cserve.policy.weights.weight_swapping import WeightSwapping


class TurnSwapping(WeightSwapping):
    """A model's weights are loaded for its turn, and those of the next turn beside it where there
    is room. Those whose turn is furthest leave. While weights are on their way, models that are
    resident go on.

    Where no model is to be kept, steps read weights where they lie, and a switch costs nothing."""

    def __init__(self, arena: KvArena, slice_: Slice) -> None:
        super().__init__(arena, slice_, rotates=True)
        self._turns = Turns(self._switch_s)

    @property
    def turns(self) -> int:
        return self._turns.begun

    def _switch_s(self, name: str) -> float:
        one = self._weights.get(name)
        return 0.0 if one is None else self._load_s(one)

    def opened(self, model: ActiveModel, spec: ModelSpec) -> None:
        self._turns.opened(model)

    def ended(self, model: ActiveModel) -> Sequence[Release]:
        self._turns.closed(model)
        return super().ended(model)

    def turn(
        self, candidates: Sequence[Candidate[str]], now: float, late_ran: bool
    ) -> tuple[bool, str] | None:
        name = self._turns.choose([name for _, _, name in candidates], now)
        return None if name is None else (False, name)

    def plan(self, now: float, in_flight: Mapping[str, float]) -> list[Fetch | Release]:
        self.wakeup, self._now, self._draining = None, now, {}
        if any(self.streams(name) is False for name in in_flight):
            self._tried.clear()
        self._reconsider(now)
        actions = self._make_way_for_long(in_flight)
        coming = self._turns.coming(now)
        for place, name in enumerate(coming[:2]):
            one = self._weights.get(name)
            if self._in["loading"]:
                break
            if one is None or one.state != "absent":
                continue
            victims = self._victims_by_turn(one, coming[place + 1 :] if place == 0 else ())
            if victims is None:
                break
            if any(other.model.name in in_flight for other in victims):
                self._draining = {other.model.name: 0.0 for other in victims}
                break
            actions += self._bring(one, victims)
        return actions

    def _victims_by_turn(
        self, one: ModelWeights, later: Collection[str]
    ) -> list[ModelWeights] | None:
        """Return the models that make room for it: those without requests, then of the `later`
        ones those whose turn is furthest. None: they cannot."""
        resident = self._in["resident"]
        able = [other for other in resident.values() if not other.model.seqs]
        busy = [resident[name] for name in reversed([*later]) if name in resident]
        able += [other for other in busy if not self._frees_kv(other)]
        victims: list[ModelWeights] = []
        for other in able:
            if self._fits(one, victims):
                break
            if other is not one:
                victims.append(other)
        return victims if self._fits(one, victims) else None
