"""Changes of the catalogue while it is served: adding, removing and reloading models.

Everything here runs on the server's event loop, changes of one model one after another. The order
of that loop makes a switch exact. A request that was handed to the controller before the switch
ends on the old version; every other request is prepared for the new one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from c2cserve.core.events import ClusterEvent, ModelAdded, ModelRemoving
from c2cserve.core.model import ModelState
from c2cserve.runtime.gateway import Refused
from c2cserve.serving.controller.directory import BrokenModel, Directory, ModelRecord
from c2cserve.serving.controller.host import HostedModel, ModelHost

log = logging.getLogger(__name__)

_POLL_S = 0.02
"""How often a reload checks whether the new weights have been loaded."""
_START_S = 2.0
"""A load beside the old weights that has not begun by then found no room after all."""
_ATTACH_S = 30.0
"""The switch does not wait longer for a slice to map the new weights: that slice's requests
wait."""


class ModelChanges:
    def __init__(
        self,
        host: ModelHost,
        directory: Directory,
        post: Callable[[ClusterEvent], None],
        running: Callable[[], set[str]],
        slices: Callable[[], set[str]],
    ) -> None:
        """`running`: versions that have requests, waiting ones too; `slices`: slices that are
        up."""
        self._host = host
        self._directory = directory
        self._post = post
        self._running = running
        self._slices = slices
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}
        """Catalogue id -> its lock, and an entry for each change that holds it or waits for it."""
        self._forgotten: dict[str, asyncio.Future[None]] = {}
        """Version -> the removal that waits until the controller has forgotten it."""

    def found(self, name: str) -> ModelRecord | BrokenModel:
        """Return the model that has this id or alias. Raises `Refused` (404)."""
        model = self._directory.find(name)
        if model is None:
            raise Refused(404, f"the model {name!r} does not exist")
        return model

    @asynccontextmanager
    async def _locked(self, name: str) -> AsyncGenerator[None, None]:
        """Hold the model's lock, which lives as long as some change needs it."""
        lock, users = self._locks.setdefault(name, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._locks[name]

    # ---- adding ---------------------------------------------------------------------------------

    def add_hosted(self, hosted: HostedModel) -> None:
        """Add a checked entry. Raises `Refused` (409) when a name is taken."""
        self._directory.add(ModelRecord(hosted))
        self._post(ModelAdded(hosted.spec))

    async def add(self, entry: dict[str, object]) -> HostedModel:
        """Check an entry, downloading its files if need be, and add it. Raises `Refused`."""
        taken = entry.get("id")
        if isinstance(taken, str):  # refused before anything is downloaded
            self._directory.check_free((taken,))
        hosted = await asyncio.to_thread(self._host.prepare, entry)
        self.add_hosted(hosted)
        return hosted

    # ---- removing -------------------------------------------------------------------------------

    async def remove(self, name: str) -> None:
        """Drain a model and take it out. Return when it is gone. Raises `Refused` (404)."""
        model = self.found(name)
        async with self._locked(model.name):
            model = self.found(model.name)  # a change before this one may have removed it
            if isinstance(model, BrokenModel):
                self._directory.forget(model)
            else:
                model.draining = True
                await self._gone(model.id)

    async def _gone(self, version: str) -> None:
        waiter = self._forgotten.get(version)
        if waiter is None:
            waiter = self._forgotten[version] = asyncio.get_running_loop().create_future()
            self._post(ModelRemoving(version))
        await asyncio.shield(waiter)

    def forgotten(self, version: str) -> None:
        """Note that the controller has forgotten the version."""
        waiter = self._forgotten.pop(version, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def end(self) -> None:
        """Note that the controller has ended, so that no removal will complete any more."""
        for waiter in self._forgotten.values():
            if not waiter.done():
                waiter.set_exception(Refused(503, "the server is shutting down"))

    # ---- reloading ------------------------------------------------------------------------------

    async def reload(self, name: str) -> ModelRecord | BrokenModel:
        """Read the model's files again. Return once its names lead to the new version. A failure
        before that leaves the old version serving. Raises `Refused` (400, 404, 503)."""
        name = self.found(name).name
        async with self._locked(name):
            old = self.found(name)
            try:
                hosted = await asyncio.to_thread(self._host.prepare, old.entry)
            except Refused as refused:
                if isinstance(old, BrokenModel):
                    self._directory.switch(replace(old, error=refused.reason))
                elif old.in_pool:
                    raise Refused(
                        refused.status,
                        f"{refused.reason}; the model goes on with what was loaded before",
                    ) from refused
                raise
            if isinstance(old, BrokenModel):
                self._directory.switch(ModelRecord(hosted))
                self._post(ModelAdded(hosted.spec))
            else:
                await self._replace(old, ModelRecord(hosted))
            return self.found(name)

    async def _replace(self, old: ModelRecord, new: ModelRecord) -> None:
        """Load the new version beside the old weights if the pool can take both. Otherwise requests
        wait for the new weights while the old version drains. Raises `Refused` if the old version
        goes on serving."""
        if not _has_memory(old):
            self._switch(new)
            self._post(ModelAdded(new.hosted.spec))
        elif self._room_beside(old, new):
            self._directory.add_beside(new)
            self._post(ModelAdded(new.hosted.spec, replaces=old.id))
            await self._loaded(old, new)
            self._switch(new)
        else:
            log.warning(
                "%s: the pool has no room for two copies; requests wait while it is loaded again",
                old.name,
            )
            self._switch(new)
            self._post(ModelAdded(new.hosted.spec, replaces=old.id))
        self._post(ModelRemoving(old.id))

    def _switch(self, new: ModelRecord) -> None:
        self._directory.switch(new)
        log.info("%s: names lead to %s", new.name, new.id)

    def _room_beside(self, old: ModelRecord, new: ModelRecord) -> bool:
        """Whether the new weights fit beside the old ones and those that cannot leave the pool."""
        running = self._running()
        stays = sum(
            record.hosted.spec.weight_bytes
            for record in self._directory
            if _has_memory(record)
            and (
                record is old
                or record.hosted.spec.pinned
                or record.state is not ModelState.READY
                or record.id in running
            )
        )
        return stays + new.hosted.spec.weight_bytes <= self._host.budget_bytes

    async def _loaded(self, old: ModelRecord, new: ModelRecord) -> None:
        """Wait until the new version can take over: every slice has loaded and mapped it, or the
        old version has lost its weights. Raises `Refused` if the new version fails."""
        started_s = time.monotonic()
        ready_s: float | None = None
        while _has_memory(old):
            now = time.monotonic()
            match new.state:
                case ModelState.FAILED:
                    reason = new.error
                    await self._gone(new.id)
                    raise Refused(
                        503,
                        f"{new.name} could not be loaded again: {reason}; the model goes on with "
                        "what was loaded before",
                    )
                case ModelState.COLD if now - started_s > _START_S:
                    return
                case ModelState.READY:
                    ready_s = now if ready_s is None else ready_s
                    if self._slices() <= new.attached or now - ready_s > _ATTACH_S:
                        return
                case _:
                    pass
            await asyncio.sleep(_POLL_S)


def _has_memory(record: ModelRecord) -> bool:
    return record.in_pool or record.state is ModelState.LOADING
