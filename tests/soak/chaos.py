"""What happens to the server while it serves: workers killed and stopped, models added, removed
and reloaded, mistakes of administrators, checkpoints that no server should serve, and a pool's
filesystem that is full."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from soak.catalogue import Model
from soak.checkpoints import BadCheckpoints
from soak.filling import Filler
from soak.findings import Findings
from soak.load import Load
from soak.moments import Moments
from soak.watch import Watch

_ADMIN_S = 120.0
"""How long removing or reloading a model may take: it drains first."""
_SHORT_STOP_S = 1.0
_AGAIN = 0.4
"""Of kills are followed by another one at once."""
_FULL_S = (1.0, 5.0)
_KILL_WHEN_FULL = 0.5
_QUICK_ENDS = 2
_SETTLED_S = 12.0
"""Workers of a slice that may be ended in a row before they were up for so long: the delay of the
next start grows with each (`serving.controller.fleet`)."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """How often, on average; 0: never."""

    kill_every_s: float
    stop_every_s: float
    admin_every_s: float
    hang_timeout_s: float
    """Of the server: a worker stopped for longer is replaced."""
    settle_s: float
    """After a kill, before the next: the machine's time for a new worker."""
    checkpoint_every_s: float
    fill_every_s: float
    attackers: int
    """Hostile clients at a time."""


class Chaos:
    """Of one phase. `run` until cancelled; `finish` puts the catalogue back."""

    def __init__(
        self, url: str, trouble: Trouble, models: Sequence[Model], load: Load, watch: Watch,
        findings: Findings, moments: Moments, rng: random.Random, checkpoints: BadCheckpoints,
        filler: Filler | None,
    ) -> None:  # fmt: skip
        """`filler`: None where the pool's filesystem is not of this run alone."""
        self._checkpoints, self._filler = checkpoints, filler
        self._url, self._trouble, self._models = url, trouble, models
        self._load, self._watch = load, watch
        self._findings, self._moments, self._rng = findings, moments, rng
        self._quick: Counter[str] = Counter()
        """Workers of a slice ended since one was up for long."""
        self._added = 0
        self._changing: set[asyncio.Future[None]] = set()
        """Changes of the catalogue under way: they are never cut off by a phase's end."""

    async def run(self) -> None:
        trouble = self._trouble
        await asyncio.gather(
            self._every(trouble.kill_every_s, self._kill),
            self._every(trouble.stop_every_s, self._stop),
            self._every(trouble.admin_every_s, self._change),
            self._every(trouble.checkpoint_every_s, self._bad_checkpoint),
            self._every(trouble.fill_every_s if self._filler else 0.0, self._fill),
        )

    async def _every(self, mean_s: float, do: Any) -> None:
        while mean_s:
            await asyncio.sleep(min(4 * mean_s, self._rng.expovariate(1 / mean_s)))
            await do()

    # ---- workers --------------------------------------------------------------------------------

    def _victim(self) -> dict[str, Any] | None:
        """A slice whose worker may be disturbed now."""
        alive = [one for one in self._watch.state.get("slices", ()) if one["pid"]]
        if not alive:
            return None
        chosen: dict[str, Any] = self._rng.choice(alive)
        if self._watch.up_for_s(int(chosen["pid"])) >= _SETTLED_S:
            self._quick[chosen["id"]] = 0
        return chosen if self._quick[chosen["id"]] < _QUICK_ENDS else None

    async def _kill(self) -> None:
        victim = self._victim()
        if victim is None or not self._end(victim, "killed"):
            return
        self._findings.events[f"killed while {victim['state']}"] += 1
        if self._rng.random() < _AGAIN:
            await self._kill_again(victim["id"])
        await asyncio.sleep(self._trouble.settle_s)

    async def _kill_again(self, slice_id: str) -> None:
        """The worker that comes next, perhaps before it is up."""
        await asyncio.sleep(self._rng.uniform(0.2, 1.0))
        state = await asyncio.to_thread(self._watch.state_now)
        [one] = [one for one in state["slices"] if one["id"] == slice_id]
        if one["pid"] and self._quick[slice_id] < _QUICK_ENDS and self._end(one, "killed"):
            self._findings.events[f"killed while {one['state']}"] += 1

    def _end(self, victim: dict[str, Any], how: str) -> bool:
        slice_id, pid = victim["id"], int(victim["pid"])
        self._quick[slice_id] += 1
        self._watch.will_end(pid, how)
        self._moments.disturbed(slice_id)
        return _signal(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    async def _stop(self) -> None:
        """Stop it for a moment, unnoticed by clients, or for good, until the server replaces it."""
        victim = self._victim()
        if victim is None or victim["state"] != "up":
            return
        pid = int(victim["pid"])
        if self._rng.random() < 0.5:
            if self._end(victim, "stopped"):
                self._findings.events["stopped until replaced"] += 1
                await asyncio.sleep(self._trouble.hang_timeout_s + self._trouble.settle_s)
            return
        self._moments.disturbed(victim["id"])
        if _signal(pid, signal.SIGSTOP):
            self._findings.events["stopped for a moment"] += 1
            try:
                await asyncio.sleep(_SHORT_STOP_S)
            finally:
                _signal(pid, signal.SIGCONT)

    # ---- the pool's filesystem ------------------------------------------------------------------

    async def _fill(self) -> None:
        """While it is full: a reload, an added model, and perhaps a worker that is killed."""
        await self._whole(self._full())
        await asyncio.sleep(self._trouble.settle_s)

    async def _full(self) -> None:
        assert self._filler is not None
        self._moments.filling()
        self._findings.events["filesystem filled"] += 1
        filling = asyncio.create_task(self._filler.fill(self._rng.uniform(*_FULL_S)))
        try:
            await asyncio.sleep(0.2)
            victim = self._victim() if self._rng.random() < _KILL_WHEN_FULL else None
            if victim is not None and self._end(victim, "killed"):
                self._findings.events["killed while full"] += 1
            await self._rng.choice((self._reload, self._add_and_remove))()
            await filling
        finally:
            self._moments.freed()

    # ---- the catalogue --------------------------------------------------------------------------

    async def _change(self) -> None:
        change = self._rng.choice((self._add_and_remove, self._reload, self._reload, self._mistake))
        await self._whole(change())

    async def _bad_checkpoint(self) -> None:
        await self._whole(self._checkpoints.one())

    async def _whole(self, change: Coroutine[Any, Any, None]) -> None:
        """Do it, to its end even if this is cancelled."""
        task = asyncio.ensure_future(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait until the changes under way are over."""
        while self._changing:
            await asyncio.gather(*self._changing)

    async def _add_and_remove(self) -> None:
        twin = self._rng.choice(self._models)
        self._added += 1
        name = f"added/{self._load.name}.{self._added}"
        model = replace(twin, id=name, twin=twin.id)
        entry = {
            "id": name, "path": str(twin.path), "max_context": twin.context, "ttft_s": 1000.0,
            "tpot_s": 1000.0, "aliases": [f"{name}-alias"],
        }  # fmt: skip
        self._moments.removing(name)
        if not await self._admin_call("POST", "/admin/models", 201, entry):
            return
        self._moments.added(name)
        self._findings.events["model added"] += 1
        self._load.extras.append(model)
        await asyncio.sleep(self._rng.uniform(1.0, 6.0))
        if self._rng.random() < 0.5:
            await self._admin_call("POST", "/admin/models", 409, entry)
        self._moments.removing(name)
        removed = await self._admin_call("DELETE", f"/admin/models/{name}", 200)
        self._load.extras.remove(model)
        self._findings.events["model removed"] += removed

    async def _reload(self) -> None:
        """The model is in the catalogue all the time."""
        model = self._rng.choice(self._models)
        done = await self._admin_call("POST", f"/admin/models/{model.id}/reload", 200)
        self._findings.events["model reloaded"] += done

    async def _mistake(self) -> None:
        model = self._rng.choice(self._models)
        method, path, status, body = self._rng.choice((
            ("POST", "/admin/models", 400, {"id": "x", "path": "/nowhere"}),
            ("POST", "/admin/models", 400, {"id": "x", "pth": str(model.path)}),
            ("POST", "/admin/models", 409, {"id": model.id, "path": str(model.path)}),
            ("DELETE", "/admin/models/no-such-model", 404, None),
            ("POST", "/admin/models/no-such-model/reload", 404, None),
            ("GET", f"/v1/models/{model.id}", 200, None),
        ))  # fmt: skip
        await self._admin_call(method, path, status, body)
        self._findings.events["administrator's mistake"] += 1

    async def _admin_call(self, method: str, path: str, status: int, body: Any = None) -> bool:
        """Whether it answered as it must."""
        timeout, began_s = aiohttp.ClientTimeout(total=_ADMIN_S), time.monotonic()
        try:
            async with (
                aiohttp.ClientSession(self._url, timeout=timeout) as session,
                session.request(method, path, json=body) as answer,
            ):
                came: object = answer.status
                text = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            came, text = type(error).__name__, str(error)
        if came == 503 and self._moments.full(began_s, time.monotonic()):
            self._findings.events["administration: no room"] += 1
            if "larger shared-memory filesystem" not in text:
                self._findings.violation("administration", "what to do when it is full", text)
        elif came != status:
            what = {"method": method, "path": path, "body": body, "status": came, "text": text}
            self._findings.violation("administration", status, what)
        return came == status


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended by itself
        return False
    return True
