"""Which weights are in a slice's memory while there are more than fit (ours).

Weights that are kept are loaded as a whole, and dropping them costs nothing: host memory has them.
A slice that has them draws tokens several times as fast as a client reads. So a model's requests
run ahead, wait while its weights are absent (their KV stays), and go on before a client notices.
The next token of an absent model is due at d_m (SLINFER's equation 1), and loading the model takes
l_m. Loads follow one another. Over the absent models, d_1 <= d_2 ..., the latest start in time is

    b_k = min(d_k, b_k+1) - l_k          the first load begins at b_1

Then the resident models that will be missed last make room, if they can be absent until they are
loaded again. Models without requests go at once. While there is room, none waits.

A model that computes always has a step in flight where a slice may have two. So victims get no new
steps from when they are chosen. When their last steps have ended they are released, and the load
begins. The choice stands until then, or until its reason is gone. Either the model that waits needs
no weights any more, or a victim's new request is due too soon. Steps in flight are part of a load:

    the first load begins at b_1 - the time that steps of its victims still take

While all are far ahead, the model that makes room soonest and for longest runs until it is done
(`favourite`).

A load may be refused: free slabs may lie in pieces that are too small for a matrix. The model asks
again, with more room. If that does not help either, it streams until KV has made way
(`_reconsider`). So does a model with a request whose KV does not fit beside the weights
(`_make_way_for_long`)."""

from collections.abc import Collection, Iterable, Sequence
from math import inf, isinf

from c2cserve.core.actions import Fetch, Release
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS
from c2cserve.policy.headroom import Candidate, next_turn
from c2cserve.policy.slice.batching import ActiveModel
from c2cserve.policy.slice.kv import KvArena
from c2cserve.policy.weights.model_weights import STATES, ModelWeights, State
from c2cserve.policy.weights.weight_memory import WeightMemory
from c2cserve.policy.weights.weight_room import WeightRoom

_MARGIN_S = 0.25
"""How long before the latest start a load begins. Several steps that were decided at once may be
running, and the first step after a load must be over in time too."""
_AT_A_TIME = 2
"""Loads over one link: more would all be late."""
EASE_S = 4.0
"""While all models have so much headroom, they do not take turns (chosen in simulation)."""
_TRIES = 3
"""Loads of a model that may be refused in a row before it streams."""
_REFUSED_S = 2.0
"""The least time for which a model whose loads were refused streams,"""
_REFUSED_MOST_S = 20.0
"""and the most, where KV reaches as far as it did then."""
_STREAM_S = 0.001
"""How soon a model that streams to break a deadlock is run."""
_WEIGHT = 0.2


class WeightSwapping(WeightMemory):
    """Books of one slice's kept weights. What KV has not taken of the arena, and what of the
    slice's memory lies outside of it, is theirs."""

    plans = True

    def __init__(self, arena: KvArena, slice_: Slice, *, rotates: bool) -> None:
        """`rotates`: models with requests leave for others; else they stay until they end."""
        super().__init__(arena)
        self._rotates = rotates
        self._room = WeightRoom(arena, slice_)
        self._bytes_per_s = slice_.load_bytes_per_s
        self._weights: dict[str, ModelWeights] = {}
        self._in: dict[State, dict[str, ModelWeights]] = {state: {} for state in STATES}
        """The same by state: most decisions concern a few of many models."""
        self._asked: dict[str, ModelWeights] = {}
        """Those that may have requests; the others have none."""
        self._there_bytes = 0  # of the weights that take room
        self._freeing: tuple[str, frozenset[str]] = "", frozenset()
        """The model that broke a deadlock, and its requests that held KV then. It stays until they
        have ended: else the models that wait for that KV would make it leave again at once."""
        self._tried: set[str] = set()
        """Models that were loaded to break a deadlock since a resident model's last step."""
        self._draining: dict[str, float] = {}
        """Victims whose steps in flight end first -> when they were needed as they were chosen,"""
        self._newcomer = ""
        """and the model for which they make room."""
        self._now = 0.0

    @property
    def scarce(self) -> bool:
        """A model with requests is out: what is decided for long must be looked at again soon."""
        return any(one.absent and one.model.seqs for one in self._asked.values())

    def computes(self, name: str) -> bool:
        """Its weights are here to stay, or prompts use them as they arrive. Or it is not kept."""
        one = self._weights.get(name)
        if one is None or name in self._draining:
            return one is None
        arrives = one.state == "loading" and self._rotates and one.prompts_wait
        there = one.state == "resident" or arrives
        return one.state == "refused" or (there and not one.too_long)

    def streams(self, name: str) -> bool | None:
        """A model that is kept streams only where it was refused; of others nothing is known."""
        one = self._weights.get(name)
        return None if one is None else one.state == "refused"

    @property
    def needed_bytes(self) -> int:
        size = sum(x.size for x in self._asked.values() if x.takes_room and x.model.seqs)
        return self._room.slabs(size) * self._arena.slab_bytes

    def capacity(self, model: ActiveModel) -> int:
        """Blocks of KV there could be for the model. A model that may stream can do without its own
        weights."""
        one = self._weights.get(model.name)
        beside = 0 if one is None or self._rotates else self._room.slabs(one.size)
        return self._arena.capacity(model.key, beside)

    # ---- events ---------------------------------------------------------------------------------

    def activated(self, model: ActiveModel, spec: ModelSpec) -> None:
        beside = self._arena.capacity(model.key, self._room.slabs(spec.weight_bytes)) * BLOCK_TOKENS
        tokens = inf if beside >= spec.max_context or not self._rotates else beside
        rank = spec.pinned, spec.priority
        one = ModelWeights(model, spec.weight_bytes, rank, spec.keep_warm_s, tokens)
        self._weights[model.name] = self._in[one.state][model.name] = one
        self._bound_cache()

    def ended(self, model: ActiveModel) -> Sequence[Release]:
        one = self._weights.get(model.name)
        if one is None or one.model is not model:
            return ()
        there, release = one.takes_room, self._release(one)
        for books in (self._weights, self._in["absent"], self._asked):
            books.pop(model.name, None)
        self._bound_cache()
        return (release,) if there else ()

    def _put(self, one: ModelWeights, state: State) -> None:
        """Note the state of a model's weights."""
        self._there_bytes -= one.size if one.takes_room else 0
        del self._in[one.state][one.model.name]
        one.state = state
        self._in[state][one.model.name] = one
        self._there_bytes += one.size if one.takes_room else 0

    def _bound_cache(self) -> None:
        self._room.wanted(sum(one.size for one in self._weights.values()))

    def fetched(self, name: str, took_s: float) -> None:
        one = self._weights.get(name)
        if one is not None and one.state == "loading":
            one.tries = 0
            one.model.loaded(took_s)
            self._put(one, "resident")
            rate = one.size / max(took_s, 1e-6)
            self._bytes_per_s += _WEIGHT * (rate - self._bytes_per_s)

    def refused(self, name: str) -> None:
        """There was no place for its weights, or KV has taken it. It asks for more room, or streams
        for a while."""
        one = self._weights.get(name)
        if one is not None and one.takes_room:
            one.tries += 1
            self._put(one, "absent")
            if one.tries == _TRIES or not self._rotates:
                one.tries = 0
                self._stream(one)
            self._withhold()

    def requested(self, name: str, now: float) -> None:
        """A request for the model has come."""
        if (one := self._weights.get(name)) is not None:
            gap_s = now - one.asked_s
            one.gap_s = gap_s if isinf(one.gap_s) else one.gap_s + _WEIGHT * (gap_s - one.gap_s)
            one.asked_s = now
            self._asked[name] = one

    # ---- decisions ------------------------------------------------------------------------------

    def plan(self, now: float, in_flight: dict[str, float]) -> list[Fetch | Release]:
        """Whose weights to load now, and who makes room. `in_flight`: models with steps in flight,
        which stay until these have ended, and in how many seconds that is expected."""
        self.wakeup = None
        self._now = now
        if self._tried and any(self.streams(name) is False for name in in_flight):
            self._tried.clear()
        self._reconsider(now)
        actions = self._make_way_for_long(in_flight)
        most = _AT_A_TIME if self._rotates else len(self._weights)
        chosen, self._draining = self._draining, {}
        while len(self._in["loading"]) < most:
            out = self._absent()
            if not out:
                break
            first = self._weights[out[0][1]]
            victims = self._victims_for(first, now, chosen)
            if victims is None:
                break  # those that could leave are not far enough ahead
            names = [one.model.name for one in victims]
            drain_s = max((in_flight.get(name, 0.0) for name in names), default=0.0)
            begin_s = self.latest_start_s(out) - _MARGIN_S - drain_s
            waits = now < begin_s and any(one.model.seqs for one in victims)
            if waits and not (chosen and first.model.name == self._newcomer):
                self.wakeup = begin_s
                break
            if any(name in in_flight for name in names):
                self._newcomer = first.model.name
                self._draining = {
                    one.model.name: chosen.get(one.model.name, one.needed_s(now)) for one in victims
                }
                break
            actions += self._bring(first, victims)
        return actions

    def _absent(self) -> list[tuple[float, str]]:
        """Return the absent models with requests by when their next tokens are due, and when."""
        for name in [name for name, one in self._asked.items() if not one.model.seqs]:
            del self._asked[name]
        return sorted([(one.due_s, name) for name, one in self._asked.items() if one.absent])

    def _reconsider(self, now: float) -> None:
        """Models whose loads were refused may be loaded again once KV reaches less far. After a
        while they may in any case: other weights may have made way."""
        for one in [*self._in["refused"].values()] if self._in["refused"] else ():
            if not one.too_long:
                since_s = one.refused_s = now if one.refused_s is None else one.refused_s
                less = self._arena.held_end_bytes < one.kv_end_bytes
                if now - since_s >= (_REFUSED_S if less else _REFUSED_MOST_S):
                    self._put(one, "absent")

    def _make_way_for_long(self, in_flight: Collection[str]) -> list[Fetch | Release]:
        """Let models stream whose longest request does not fit beside their weights. Steps in
        flight end first; there are no new ones meanwhile."""
        actions: list[Fetch | Release] = []
        long = [one for one in self._asked.values() if one.too_long]
        if len(long) > 1:
            long.sort(key=lambda one: one.model.number)
        for one in long:
            if one.state == "resident" and one.model.name not in in_flight:
                actions.append(self._release(one))
            if one.state == "absent":
                self._stream(one)
        return actions

    def turn(
        self, candidates: Sequence[Candidate[str]], now: float, late_ran: bool
    ) -> tuple[bool, str] | None:
        """Decide as `headroom.next_turn`, as long as a model might become late."""
        if candidates and all(one[0] >= now + EASE_S for one in candidates):
            favourite = self.favourite([name for _, _, name in candidates], now)
            if favourite is not None:
                return False, favourite
        return next_turn(candidates, now, late_ran)

    def favourite(self, names: Iterable[str], now: float) -> str | None:
        """Return the model that runs while all are far ahead: its weights make room soonest and for
        longest. The worth of its step is weight bytes * seconds until its next request is expected
        / seconds of the step. By Smith's rule this gives the least weighted waiting for memory.
        None: no model here makes room for others."""
        most, first = 0, ""
        for name in names if self._rotates and self._weights else ():
            one = self._weights.get(name)
            worth = 0 if one is None else one.worth(now)
            if not first or worth > most or (worth == most and name > first):
                most, first = worth, name
        return first or None

    def make_room(
        self, model: ActiveModel, in_flight: Collection[str], now: float
    ) -> list[Release]:
        """KV of a model with requests finds no room: the weights that go for it, those of the model
        that would be missed last. Nothing if none can, if KV gains nothing by it, or if those are
        more urgent. Else the two would make each other leave in turn."""
        victim = next(iter(self._victims(model.name, in_flight, now)), None)
        there = self._there_bytes
        if victim is None or self._room.slabs(there - victim.size) == self._room.slabs(there):
            return []
        if victim.model.seqs and victim.due_s <= model.most_urgent_due_s():
            return []
        return [self._release(victim)]

    def break_deadlock(self) -> list[Fetch | Release]:
        """Deadlock: resident models find no free KV blocks, and the models that hold them are
        absent. Load the holder that is due first, with as many victims as it takes. If none is
        absent, or that one was loaded before and no step ran since, weights leave too little room
        for any KV. Then the model that is due last streams."""
        absent = [one for one in self._asked.values() if one.absent and one.model.seqs]
        if not self._rotates or self._in["loading"]:
            return []
        if not absent:
            return self._give_way()
        first = min(absent, key=lambda one: (not one.model.started, one.due_s, one.model.name))
        if first.model.name in self._tried and (actions := self._give_way()):
            return actions
        self._tried.add(first.model.name)
        there = list(self._in["resident"].values())
        there.sort(key=lambda one: (-one.due_s if one.model.seqs else -inf, one.model.name))
        for count in range(len(there) + 1):
            if self._fits(first, there[:count]):
                held = frozenset(name for name, seq in first.model.seqs.items() if seq.started)
                self._freeing = first.model.name, held
                return self._bring(first, there[:count])
        # KV of all leaves no room for it, whatever else goes: it streams until that has changed.
        self._stream(first)
        self.wakeup = self._now + _STREAM_S
        return []

    def _give_way(self) -> list[Fetch | Release]:
        there = [one for one in self._in["resident"].values() if one.model.seqs]
        if not there or not self._rotates:
            return []
        last = max(there, key=lambda one: (one.due_s, one.model.name))
        release = self._release(last)
        self._stream(last)
        self.wakeup = self._now + _STREAM_S
        return [release]

    def _frees_kv(self, one: ModelWeights) -> bool:
        """Whether it has broken a deadlock, and its KV is not free yet."""
        name, held = self._freeing
        seqs = one.model.seqs
        return one.model.name == name and any(id_ in seqs and seqs[id_].started for id_ in held)

    def _bring(self, one: ModelWeights, victims: Iterable[ModelWeights]) -> list[Fetch | Release]:
        actions: list[Fetch | Release] = [self._release(other) for other in victims]
        self._put(one, "loading")
        one.model.loading_s = self._now
        self._withhold()
        return [*actions, Fetch(one.model.name)]

    def latest_start_s(self, out: Iterable[tuple[float, str]]) -> float:
        """Return when loading must begin for all to be in time; `out`: (due, model)."""
        begin_s = float("inf")
        for due_s, name in sorted(out, reverse=True):
            begin_s = min(begin_s, due_s) - self._load_s(self._weights[name])
        return begin_s

    def _load_s(self, one: ModelWeights) -> float:
        return one.size / self._bytes_per_s if self._bytes_per_s > 0.0 else 0.0

    def _victims_for(
        self, first: ModelWeights, now: float, chosen: dict[str, float]
    ) -> list[ModelWeights] | None:
        """Return the victims that make room for it. Those without requests go first, then those
        `chosen` before. None: those that could must not be absent."""
        victims: list[ModelWeights] = []
        able = self._victims(first.model.name, (), now)
        able.sort(key=lambda one: (bool(one.model.seqs), one.model.name not in chosen))
        candidates = iter(able)
        while not self._fits(first, victims):
            victim = next(candidates, None)
            if victim is None or self._must_stay(victim, first, now, chosen):
                return None
            victims.append(victim)
        return victims

    def _must_stay(
        self, victim: ModelWeights, first: ModelWeights, now: float, chosen: dict[str, float]
    ) -> bool:
        """Return whether a victim would be needed before it could be back. Of one that was `chosen`
        this was known: only a new request, which makes it more urgent, is a reason to stay."""
        needed_s = victim.needed_s(now)
        if not victim.model.seqs or needed_s >= chosen.get(victim.model.name, inf):
            return False
        back_s = self._load_s(first) + self._load_s(victim)
        return needed_s < max(now, first.due_s) + back_s

    def _victims(self, name: str, in_flight: Collection[str], now: float) -> list[ModelWeights]:
        """Return the models that could leave, the one that would be missed last in front."""
        if not self._rotates:
            return []
        able = [
            one for other, one in self._in["resident"].items()
            if other != name and other not in in_flight and not self._frees_kv(one)
        ]  # fmt: skip
        unused = [one for one in able if not one.model.seqs]
        unused.sort(key=lambda one: (one.value(now), one.model.name))
        busy = [one for one in able if one.model.seqs]
        busy.sort(key=lambda one: (-one.needed_s(now), one.model.name))
        return unused + busy

    def _stream(self, one: ModelWeights) -> None:
        """Let a model without weights here stream, until it is reconsidered."""
        self._put(one, "refused")
        one.refused_s, one.kv_end_bytes = None, self._arena.held_end_bytes

    def _release(self, one: ModelWeights) -> Release:
        self._put(one, "absent")
        self._draining.pop(one.model.name, None)
        self._withhold()
        return Release(one.model.name)

    def _fits(self, one: ModelWeights, victims: Collection[ModelWeights]) -> bool:
        return self._room.fits(one, self._there_bytes - sum(other.size for other in victims))

    def _withhold(self) -> None:
        self._arena.withhold(self._room.slabs(self._there_bytes))
