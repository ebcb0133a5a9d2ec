"""A node's part in changes of the catalogue: it makes them, and hands them on to its fronts."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping

from c2cserve.cluster.catalogue import ModelChanges, unpinned
from c2cserve.cluster.messages import Applied, ModelChange
from c2cserve.runtime.gateway import Gateway, Refused

log = logging.getLogger(__name__)


class NodeChanges:
    def __init__(self, gateway: Gateway) -> None:
        self.changes = ModelChanges()
        self._gateway = gateway
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()

    def take(
        self, given: Mapping[str, ModelChange], answer: Callable[[Applied], None]
    ) -> dict[str, ModelChange]:
        """Begin to make changes. `answer` is called for each when it is done or refused, also for
        those that were known before. Return those that are new here."""
        new = self.changes.newer(given)
        for model, change in given.items():
            task = asyncio.get_running_loop().create_task(
                self._make(model, change if model in new else None, change, answer)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return new

    async def _make(
        self, model: str, due: ModelChange | None, asked: ModelChange,
        answer: Callable[[Applied], None],
    ) -> None:  # fmt: skip
        status, reason = 200, ""
        async with self._locks[model]:  # what is known already may still be under way
            try:
                if due is not None and self.changes.last.get(model) is due:
                    await self._change(model, due)
            except Refused as refused:
                status, reason = refused.status, refused.reason
                log.warning("%s: its change is refused: %s", model, reason)
        answer(Applied(model, asked.number, asked.front, status, reason))

    async def _change(self, model: str, change: ModelChange) -> None:
        known = self._known(model)
        if change.reload and known:
            await self._gateway.reload_model(model)
            return
        if known:
            await self._gateway.remove_model(model)
        if change.entry is not None:
            await self._gateway.add_model(unpinned(change.entry))

    def _known(self, model: str) -> bool:
        try:
            return self._gateway.resolve(model) is not None
        except Refused:  # it is broken, and there
            return True
