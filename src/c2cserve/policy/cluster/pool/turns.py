"""Whose turn it is in a pool that does not hold all models in use.

A model leaves the pool when it has no requests. If all of them always have some, a model outside
would wait for ever. So once the first token of its oldest request is overdue, others are closed for
it. Their new requests wait. When those on slices have ended, they leave. They come back in the same
way.

- One model at a time has others closed for it, the one that is overdue for longest. The next one's
  turn comes as soon as its load begins, so models end their requests while others load.
- Closed are as many as it takes of those used least often. None of them has a request that waits
  for longer than the overdue one, and each has stayed for as long as its load took.
"""

from collections.abc import Collection, Iterable, Iterator
from heapq import heapify

from c2cserve.policy.cluster.pool.residency import (
    ModelBook,
    PoolBooks,
    evictable,
    evictions,
    unused_of,
    unwaited,
)
from c2cserve.policy.cluster.queue import WaitingQueue


class PoolTurns:
    def __init__(self, models: dict[str, ModelBook], books: PoolBooks, queue: WaitingQueue) -> None:
        self._models, self._books, self._queue = models, books, queue
        self.owed = ""
        """The model outside for which others are closed, or that is the first to be loaded."""
        self._closed: list[ModelBook] = []

    def begin(self, now: float) -> bool:
        """Open models again if the one they were closed for has been loaded, or has no requests any
        more. Return whether there were some."""
        if not self.owed or self._due_s(self.owed, now) is not None:
            return False
        for model in self._victims():
            model.closing, model.serves_since_s = False, now
        self.owed, self._closed = "", []
        return True

    def loads(
        self, wanted: Collection[ModelBook], free_bytes: int, now: float
    ) -> Iterator[tuple[ModelBook, list[ModelBook]]]:
        """Yield which models can be loaded of those that waiting requests need or that are
        `wanted`, the most urgent first. Yield also which others are evicted for each. `free_bytes`:
        of the pool."""
        models, waiting, owed = self._models, self._queue.models(), self.owed
        asked = [
            (name != owed, head[0], name) for name in waiting
            if models[name].may_load(now) and (head := self._queue.head(name))
        ]  # fmt: skip
        asked += [(name != owed, first, name) for first, name in unwaited(wanted, waiting, now)]
        if not asked:
            return
        kept = {*waiting, *(model.replaces for model in wanted)}
        unused = evictable(models.values(), kept, now)
        for _, _, name in sorted(asked):
            size = models[name].spec.weight_bytes
            if name == owed:
                unused += unused_of((one for one in self._victims() if not one.running), now)
                heapify(unused)
            victims = evictions(unused, size - free_bytes)
            if name == owed:  # what was closed for it leaves for no other one
                unused = [one for one in unused if not one[-1].closing]
                heapify(unused)
            if victims is None:
                if name == owed:  # what it needs beside that leaves for no other one, either
                    closed = sum(one.spec.weight_bytes for one in self._victims())
                    free_bytes -= max(0, size - closed)
                continue
            free_bytes += sum(victim.spec.weight_bytes for victim in victims)
            free_bytes -= size
            yield models[name], victims

    def end(self, free_bytes: int, now: float) -> None:
        """Close models for the one outside that is overdue for longest, if it could not be loaded.
        `free_bytes`: of the pool."""
        if self.owed:
            return
        late = [
            (due_s, name) for name in self._queue.models()
            if (due_s := self._due_s(name, now)) is not None
        ]  # fmt: skip
        if not late:
            return
        due_s, name = min(late)
        unused = evictable(self._models.values(), self._queue.models(), now)
        idle = {one[-1].spec.id for one in unused}
        lacking = self._models[name].spec.weight_bytes - free_bytes
        lacking -= sum(one[-1].spec.weight_bytes for one in unused)
        busy = (model for model in self._may_close(due_s, now) if model.spec.id not in idle)
        victims = evictions(unused_of(busy, now), lacking)
        if victims is not None:
            self.owed, self._closed = name, victims
            for model in victims:
                model.closing = True

    def _victims(self) -> list[ModelBook]:
        """Return the closed models that are still in the pool."""
        return [one for one in self._closed if one.closing]

    def _due_s(self, name: str, now: float) -> float | None:
        """Return since when a model outside that may be loaded has a request that is overdue."""
        model = self._books.outside.get(name)
        if model is None or not model.may_load(now) or not self._queue.count(name):
            return None
        due_s = self._queue.due_s(name)
        return due_s if due_s < now else None

    def _may_close(self, due_s: float, now: float) -> Iterable[ModelBook]:
        """Yield the models that may be closed for one that is overdue since `due_s`."""
        for name, model in self._models.items():
            waits = self._queue.count(name) and self._queue.due_s(name) <= due_s
            stays = not model.loaded or model.spec.pinned or model.removing
            if not (waits or stays) and now >= model.stays_until_s:
                yield model
