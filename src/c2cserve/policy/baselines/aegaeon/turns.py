"""Whose turn it is on a slice, by Aegaeon's rules (SOSP 25, its section 4).

*Prompts* run in groups, first come first served. A group has up to `GROUP_MOST` prompts of one
model, so that one switch serves all of them.

*Decodes* run in rounds. In a round each model with decodes has one turn. A client reads a token
every d_i seconds, and a decode step takes t_i. So after a turn of q_i seconds, tokens for
n_i * q_i seconds are there, with n_i = d_i / t_i. With `c` the seconds of all switches in a round,

    q_i = c / (n_i * (alpha - sum 1 / n_k))
    alpha = max(c / (Q_MAX * min n_k) + sum 1 / n_k, 1/2)

All models have the same slack at the end of their turns then. 1 / alpha is the share of tokens that
can be in time. A turn has at least one step. Where a switch costs nothing, it has exactly one.

The published system has instances for prompts and others for decodes. One slice has both here, and
prompts go first: that is what keeps first tokens in time. Their seconds do not count as a turn's.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from c2cserve.policy.slice.batching import ActiveModel, Seq

GROUP_MOST = 8
"""Prompts of a group."""
Q_MAX_S = 4.0
"""No turn is longer."""
_ALPHA_MIN = 0.5


def quotas(paces: Sequence[tuple[float, float]], switch_s: float) -> list[float]:
    """Return the seconds of each model's turn. `paces`: seconds per token that a client wants, and
    seconds of a decode step, 0 if that is unknown. `switch_s`: seconds of all switches."""
    ratios = [step_s / tpot_s for tpot_s, step_s in paces]
    if switch_s <= 0.0 or not any(ratios):
        return [0.0] * len(ratios)
    spare = max(switch_s * max(ratios) / Q_MAX_S, _ALPHA_MIN - sum(ratios))
    return [switch_s * ratio / spare for ratio in ratios]


class Turns:
    """The turns of one slice's models."""

    def __init__(self, switch_s: Callable[[str], float]) -> None:
        """`switch_s`: the seconds that it takes to bring a model's weights."""
        self._switch_s = switch_s
        self._models: dict[str, ActiveModel] = {}
        self._round: deque[tuple[str, float]] = deque()
        """Turns to come in this round: model, seconds."""
        self._running = ""
        """The model whose turn it is,"""
        self._left_s = 0.0
        """and what is left of it."""
        self._since_s: float | None = None
        """When its last step began. None: it has had none, or prompts have run since."""
        self._group = "", 0
        """The model of the group of prompts that runs, and how many of them are still to begin."""
        self._tried: tuple[str, int, int] | None = None
        self._blocked: dict[str, tuple[int, int]] = {}
        """Models whose next prompt found no room -> their requests, and those that run. Until this
        changes, prompts of others and decodes go on."""
        self.begun = 0
        """Turns and groups that have begun."""

    def opened(self, model: ActiveModel) -> None:
        self._models[model.name] = model

    def closed(self, model: ActiveModel) -> None:
        """Forget a model, unless it is active again."""
        if self._models.get(model.name) is model:
            del self._models[model.name]
            self._blocked.pop(model.name, None)

    def choose(self, able: Collection[str], now: float) -> str | None:
        """Return which of the models that are `able` to run has the next step."""
        name = self._prompts(able)
        if name is not None:
            self._since_s = None
            return name
        if self._since_s is not None:
            self._left_s -= now - self._since_s
        name = self._decodes(able)
        self._since_s = now
        return name

    def coming(self, now: float) -> list[str]:
        """Return the models with requests in the order in which they will run."""
        first = sorted(self._oldest(self._models))
        names = [self._group[0], *(name for _, name in first if name not in self._blocked)]
        names += [self._running, *(name for name, _ in self._round), *sorted(self._models)]
        return [name for name in dict.fromkeys(names) if self._has_requests(name)]

    def _has_requests(self, name: str) -> bool:
        return name in self._models and bool(self._models[name].seqs)

    # ---- prompts --------------------------------------------------------------------------------

    def _prompts(self, able: Collection[str]) -> str | None:
        self._note_blocked()
        oldest = {name: arrival_s for arrival_s, name in self._oldest(able)}
        name, left = self._group
        if name not in oldest or left <= 0:
            if not oldest:
                self._group = "", 0
                return None
            name = min(oldest, key=lambda one: (oldest[one], one))
            left = min(GROUP_MOST, len(_prompts_of(self._models[name])))
            self.begun += 1
        self._group = name, left - 1
        self._tried = name, *_progress(self._models[name])
        return name

    def _oldest(self, names: Iterable[str]) -> list[tuple[float, str]]:
        """Return when the oldest prompt of each model has come, of those that find room."""
        found: list[tuple[float, str]] = []
        for name in names:
            model = self._models.get(name)
            if model is None or self._blocked.get(name) == (len(model.seqs), model.started):
                continue
            prompts = _prompts_of(model)
            if prompts:
                found.append((min(seq.request.arrival_s for seq in prompts), name))
        return found

    def _note_blocked(self) -> None:
        """A model whose prompts had the last step and got none of it waits for a change."""
        if self._tried is None:
            return
        name, *before = self._tried
        self._tried, model = None, self._models.get(name)
        if model is not None and [*_progress(model)] == before:
            self._blocked[name] = len(model.seqs), model.started

    # ---- decodes --------------------------------------------------------------------------------

    def _decodes(self, able: Collection[str]) -> str | None:
        ready = [name for name in sorted(able) if _decodes_of(self._models[name])]
        if not ready:  # nothing of the others can begin either, but they are asked in their turn
            return min(able, default=None)
        if self._running in ready and self._left_s > 0.0:
            return self._running
        for _ in range(2):
            while self._round:
                name, seconds = self._round.popleft()
                if name in ready:
                    self._running, self._left_s = name, seconds
                    self.begun += 1
                    return name
            self._new_round()
        self._running, self._left_s = ready[0], 0.0
        return ready[0]

    def _new_round(self) -> None:
        names = [name for name, model in sorted(self._models.items()) if _decodes_of(model)]
        models = [self._models[name] for name in names]
        paces = [(one.tpot_s, one.time.decode_step_s(len(one.seqs))) for one in models]
        switch_s = sum(map(self._switch_s, names)) if len(names) > 1 else 0.0
        self._round.extend(zip(names, quotas(paces, switch_s), strict=True))


def _prompts_of(model: ActiveModel) -> list[Seq]:
    """Return the requests whose prompts are not computed yet, nor in a step."""
    return [seq for seq in model.seqs.values() if _is_prompt(seq)]


def _is_prompt(seq: Seq) -> bool:
    if seq.paused or seq.stopping:
        return False
    return not seq.started or seq.issued < seq.expected - 1


def _decodes_of(model: ActiveModel) -> int:
    return sum(1 for seq in model.seqs.values() if seq.started and not _is_prompt(seq))


def _progress(model: ActiveModel) -> tuple[int, int]:
    prompts = _prompts_of(model)
    return len(prompts), sum(seq.issued for seq in prompts)
