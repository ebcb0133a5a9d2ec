"""Changes of the catalogue at a front: checked here, then made by all nodes, then known."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from c2cserve.cluster.catalogue import ModelChanges
from c2cserve.cluster.link import NodeLink
from c2cserve.cluster.messages import Applied, ModelChange
from c2cserve.core.events import ModelAdded, ModelRemoving
from c2cserve.runtime.gateway import Refused
from c2cserve.serving.controller.host import HostedModel
from c2cserve.serving.front.models import FrontModels

log = logging.getLogger(__name__)

Prepare = Callable[[dict[str, object]], HostedModel]
"""`serving.controller.host.ModelHost.prepare`."""
_Key = tuple[str, int, str]


class FrontCatalogue:
    """Used on the event loop of the front."""

    def __init__(
        self, front: str, models: FrontModels, prepare: Prepare,
        links: Callable[[], Iterable[NodeLink]], tell: Callable[[ModelAdded | ModelRemoving], None],
    ) -> None:  # fmt: skip
        """`links`: to the nodes that are up. `tell`: gives the policy an event."""
        self._front = front
        self._models = models
        self._prepare = prepare
        self._links = links
        self._tell = tell
        self._changes = ModelChanges()
        self._waiting: dict[tuple[NodeLink, _Key], asyncio.Future[Applied | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- what an administrator asks -------------------------------------------------------------

    async def add(self, entry: dict[str, Any]) -> str:
        """Add an entry on all nodes. Return its id. Raises `Refused`; no node has it then."""
        if isinstance(name := entry.get("id"), str):  # refused before anything is downloaded
            self._models.check_free((name,))
        hosted = await asyncio.to_thread(self._prepare, entry)
        name = hosted.spec.name
        self._models.check_free((name, *hosted.aliases))
        try:
            await self._everywhere(name, entry)
        except Refused:
            await self._everywhere(name, None)
            raise
        self._put(hosted)
        return name

    async def remove(self, name: str) -> None:
        """Take a model out. Return when no node has it any more. Raises `Refused`."""
        name = self._models.id_of(name)
        self._check_nodes()
        self._drop(name)
        await self._everywhere(name, None)

    async def reload(self, name: str) -> str:
        """Let all nodes read the model's files again. Return its id. Raises `Refused`; then some
        nodes may go on with what they read before."""
        name = self._models.id_of(name)
        entry = self._models.entry_of(name)
        hosted = await asyncio.to_thread(self._prepare, entry)
        await self._everywhere(name, entry, reload=True)
        self._put(hosted)
        return name

    def _check_nodes(self) -> None:
        if not all(link.knows_changes for link in self._links()):
            raise Refused(501, "a node of an older version cannot change its catalogue: restart it")

    async def _everywhere(
        self, name: str, entry: dict[str, Any] | None, *, reload: bool = False
    ) -> None:
        """Make a change on all nodes that are up. Others get it when they come. Raises `Refused`
        if a node refuses."""
        self._check_nodes()
        change = self._changes.make(self._front, name, entry, reload=reload)
        key = (name, change.number, change.front)
        answers: list[asyncio.Future[Applied | None]] = []
        for link in self._links():
            answer = self._waiting[link, key] = asyncio.get_running_loop().create_future()
            answers.append(answer)
            link.tell_changes({name: change})
        for applied in await asyncio.gather(*answers):
            if applied is not None and applied.status != 200:
                raise Refused(applied.status, applied.reason)

    # ---- what nodes say -------------------------------------------------------------------------

    def node_up(self, link: NodeLink) -> None:
        """Tell a node all changes: it has started with the catalogue of the cluster's start."""
        if self._changes.last and link.knows_changes:
            link.tell_changes(self._changes.last)

    def node_lost(self, link: NodeLink) -> None:
        """Wait for nothing from it. It is told again when it comes back."""
        for key in [one for one in self._waiting if one[0] is link]:
            self._answered(key, None)

    def applied(self, link: NodeLink, applied: Applied) -> None:
        self._answered((link, (applied.model, applied.number, applied.front)), applied)

    def _answered(self, key: tuple[NodeLink, _Key], applied: Applied | None) -> None:
        answer = self._waiting.pop(key, None)
        if answer is not None and not answer.done():
            answer.set_result(applied)

    def changed(self, changes: Mapping[str, ModelChange]) -> None:
        """Follow what other fronts have changed."""
        for name, change in self._changes.newer(changes).items():
            if change.entry is None:
                self._drop(name)
                continue
            task = asyncio.get_running_loop().create_task(self._follow(name, change))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _follow(self, name: str, change: ModelChange) -> None:
        assert change.entry is not None
        try:
            hosted = await asyncio.to_thread(self._prepare, change.entry)
        except Refused as refused:
            log.error("another front has added %s, which is not served here: %s", name, refused)
            return
        if self._changes.last.get(name) is change:
            self._put(hosted)

    # ---- the catalogue --------------------------------------------------------------------------

    def _put(self, hosted: HostedModel) -> None:
        self._models.put(hosted)
        # Versions are each machine's own: the policy knows models by their ids.
        self._tell(ModelAdded(replace(hosted.spec, id=hosted.spec.name)))

    def _drop(self, name: str) -> None:
        if self._models.drop(name):
            self._tell(ModelRemoving(name))
