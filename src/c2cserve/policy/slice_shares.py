"""Fair shares of a slice's time among tenants (ours).

Between slices fairness counts work (`policy.cluster.fairness`); on a slice, a request waits for
steps. A tenant is *greedy* while it has more requests here than the tenants have on average. Its
requests then go behind those of the others. So few of them have a part in a step that it does not
take much longer for the others:

    step time with greedy requests <= 1.5 * step time without them
    greedy requests alone: once after three such steps, for as long as the shortest of these

So a request of another tenant is at most about half slower than alone. Each of these steps has a
part for one greedy request at least, the one with least headroom, so none of them starves. Alone on
the slice, a tenant is never greedy.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from c2cserve.policy.headroom import Candidate
from c2cserve.policy.slice.batching import ActiveModel, Line, Seq

_TOGETHER = 1.5
_APART = 1.0
_TURNS = 3
_ABSENT = 4.0
"""While a tenant may come back, a step takes at most so many times that of a single request."""
_RECENT_S = 1.0
"""How long a tenant whose last request has ended is expected back."""


class SliceShares:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        """Requests of each tenant that has some here."""
        self._left_s: dict[str, float] = {}
        """When the last request of a tenant ended here."""
        self.greedy: Set[str] = frozenset()
        self._turns = 0
        """Steps with requests of other tenants since the last one without."""

    def entered(self, tenant: str) -> None:
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        self._left_s.pop(tenant, None)

    def left(self, tenant: str, now: float) -> None:
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
            self._left_s[tenant] = now

    def refresh(self, now: float) -> None:
        """Find the tenants that are greedy now."""
        if self._left_s:
            gone = [one for one, left_s in self._left_s.items() if now - left_s > _RECENT_S]
            for tenant in gone:
                del self._left_s[tenant]
        tenants = len(self._counts) + len(self._left_s)
        if tenants < 2:
            if self.greedy:
                self.greedy = frozenset()
            return
        average = sum(self._counts.values()) / tenants
        self.greedy = {one for one, count in self._counts.items() if count > average}

    def is_greedy(self, seq: Seq) -> bool:
        return seq.request.tenant in self.greedy

    def candidates(
        self, models: Sequence[Candidate[str]], active: Mapping[str, ActiveModel]
    ) -> Sequence[Candidate[str]]:
        """Return those of the models whose turn it may be. Models that only greedy tenants ask for
        wait for steps of the others, if there are some."""
        if not self.greedy or self._turns >= _TURNS:
            return models
        return [one for one in models if self._modest(active[one[2]])] or models

    def ran(self, model: ActiveModel) -> None:
        """Note that a step of the model was launched."""
        if self.greedy:
            self._turns = self._turns + 1 if self._modest(model) else 0

    def _modest(self, model: ActiveModel) -> int:
        """Return the number of its requests of tenants that are not greedy."""
        return sum(not self.is_greedy(seq) for seq in model.seqs.values())

    def lines(
        self, model: ActiveModel, line: Line, models: Mapping[str, ActiveModel]
    ) -> Sequence[tuple[Line, float | None]]:
        """Return the requests of the model's next step. Those of greedy tenants are last, and only
        as many as may decode in it. If none of these can run, another greedy one may, alone: they
        may wait for memory that it holds, or behind it. So the others follow, one by one. Return
        also how long the step may take if it holds a greedy prompt (None: as long as any)."""
        if not self.greedy:
            return ((line, None),)
        decodes, spared = self._split(line[0])
        prompts, greedy_prompts = self._split(line[1])
        limit_s = self._limit_s(model, len(decodes) + len(prompts), models.values())
        if limit_s is None:
            first = decodes + spared[:1], prompts + greedy_prompts[:1]
            return _one_by_one(first, spared[1:], greedy_prompts[1:], 0.0)
        room = 1
        while room < len(spared):
            if model.time.decode_step_s(len(decodes) + room + 1) > limit_s:
                break
            room += 1
        first = decodes + spared[:room], prompts + greedy_prompts
        return _one_by_one(first, spared[room:], (), limit_s)

    def _split(self, seqs: Iterable[Seq]) -> tuple[list[Seq], list[Seq]]:
        sides: tuple[list[Seq], list[Seq]] = ([], [])
        for seq in seqs:
            sides[self.is_greedy(seq)].append(seq)
        return sides

    def _limit_s(
        self, model: ActiveModel, modest: int, models: Iterable[ActiveModel]
    ) -> float | None:
        """Return how long a step of the model may take, with so many requests of tenants that are
        not greedy. None: times of the steps to compare with are not known."""
        if modest:
            return _times(model, modest, _TOGETHER)
        limits: list[float] = []
        for other in models:
            count = self._modest(other)
            if count:
                limit_s = _times(other, count, _APART)
                if limit_s is None:
                    return None
                limits.append(limit_s)
        return min(limits) if limits else _times(model, 1, _ABSENT)


def _one_by_one(
    first: Line, decodes: Iterable[Seq], prompts: Iterable[Seq], limit_s: float
) -> list[tuple[Line, float | None]]:
    lines = [first, *(([seq], []) for seq in decodes), *(([], [seq]) for seq in prompts)]
    return [(line, limit_s) for line in lines]


def _times(model: ActiveModel, batch: int, factor: float) -> float | None:
    if not model.time.knows(batch):
        return None
    return factor * model.time.decode_step_s(batch)
