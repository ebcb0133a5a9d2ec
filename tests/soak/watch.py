"""The server seen from outside while it is asked: health, counters, memory, log, pool."""

import asyncio
import json
import re
import time
from collections.abc import Collection
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from catalogue_server import Server, ServerFailed, gpu_used_bytes

from soak.findings import Findings
from soak.memory import Memory
from soak.moments import LOOK_S, Moments

HEALTH_S = 5.0
"""Within which /health must answer; a controller that is silent for longer is not healthy."""
_HEALTH_EVERY_S = 0.1
_POOL_FILES_SLACK = 16 << 20
"""Control files, status pages."""
_OF_WORKER = re.compile(r"worker of slice (\S+) \(pid (\d+)\): ")
_MODEL = re.compile(r'[{,]model_name="([^"]*)"')
_SEEN_S = 10.0
"""After it was written, until a line of the log is read."""
_OF_FULL = ("No space left on device", "larger shared-memory filesystem")
_OF_HOUSE = "a slice's process was ended before its slice"


class Watch:
    """Of one server. `run` until cancelled, then `finish`."""

    def __init__(
        self, server: Server, log: Path, pool: Path, findings: Findings, moments: Moments,
        memory: Memory, stay: Collection[str],
    ) -> None:  # fmt: skip
        """`stay`: the models that are never removed."""
        self._server, self._log, self._pool = server, log, pool
        self._findings, self._moments = findings, moments
        self._memory, self._began_s = memory, time.monotonic()
        self._stay = frozenset(stay)
        self._samples: dict[str, float] = {}
        self._read = 0
        self._ended: dict[int, str] = {}
        """Workers that were killed or stopped for long, and what was done."""
        self._ended_s = -1e9
        self._up_since_s: dict[int, float] = {}
        self.state: dict[str, Any] = {}
        self._health_s: list[float] = []

    def will_end(self, pid: int, how: str) -> None:
        self._ended[pid] = how
        self._ended_s = time.monotonic()

    def state_now(self) -> dict[str, Any]:
        return self._server.state()

    def up_for_s(self, pid: int) -> float:
        """How long the worker has been seen to be up."""
        since_s = self._up_since_s.get(pid)
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def run(self) -> None:
        """Raises ServerFailed if the server ends by itself."""
        await asyncio.gather(self._healthy(), self._look_on())

    async def _healthy(self) -> None:
        """A process of its own would see more; a loop beside others sees what clients see."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_S)
        async with aiohttp.ClientSession(self._server.url, timeout=timeout) as session:
            while True:
                began_s = time.monotonic()
                try:
                    async with session.get("/health") as answer:
                        status: object = answer.status
                        await answer.read()
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    status = f"{type(error).__name__}: {error}"
                took_s = time.monotonic() - began_s
                self._health_s.append(took_s)
                outage = status == 503 and self._moments.outage(began_s, time.monotonic())
                if status != 200 and not outage and self._moments.draining_s > began_s:
                    self._findings.violation("/health", f"200 within {HEALTH_S} s", status)
                await asyncio.sleep(_HEALTH_EVERY_S)

    async def _look_on(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self.refresh)
            except (OSError, ValueError) as error:
                if self._moments.draining_s < float("inf"):
                    return
                if self._server.wait(0) is not None:
                    raise ServerFailed(f"it ended:\n{self._server.last_words()}") from error
                self._findings.violation("/admin/state or /metrics", "an answer", repr(error))
            await asyncio.sleep(LOOK_S)

    def refresh(self) -> None:
        self.state = self._server.state()
        up = {int(one["pid"]) for one in self.state["slices"] if one["state"] == "up"}
        self._moments.looked(len(up), [one["id"] for one in self.state["slices"]])
        now = time.monotonic()
        self._up_since_s = {pid: self._up_since_s.get(pid, now) for pid in up}
        self._counters(self._server.samples())
        self._look_at_memory()
        self._files()
        self._errors()

    # ---- counters -------------------------------------------------------------------------------

    def _counters(self, samples: dict[str, float]) -> None:
        """Counters only rise. Those of a slice begin anew with its worker, and those of a model go
        with it."""
        before, self._samples = self._samples, samples
        for name, value in before.items():
            counts = name.split("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))
            of_slice = 'slice="' in name and "restarts" not in name
            gone = name not in samples and _model_of(name) not in {None, *self._stay}
            if counts and not of_slice and not gone and samples.get(name, -1.0) < value:
                self._findings.violation("a counter fell", f"{name} >= {value}", samples.get(name))
        preempted = [
            name for name, value in samples.items()
            if name.startswith("vllm:num_preemptions_total") and value > before.get(name, 0.0)
        ]  # fmt: skip
        if preempted:
            self._moments.preempted()

    def counted(self, name: str, label: str = "") -> float:
        """A counter's samples with the label, added, as they were last; of models that stay."""
        return sum(
            value
            for key, value in self._samples.items()
            if key.startswith(name + "{") and label in key and _model_of(key) in self._stay
        )

    # ---- memory ---------------------------------------------------------------------------------

    def _files(self) -> None:
        used, budget = self.state["pool_used_bytes"], self.state["pool_budget_bytes"]
        files = 0
        for path in self._pool.iterdir():
            try:
                files += path.stat().st_blocks * 512
            except FileNotFoundError:  # it has just been removed
                continue
        if used > budget or files > budget + _POOL_FILES_SLACK:
            self._findings.violation("the pool's budget", budget, {"used": used, "files": files})

    def _look_at_memory(self) -> None:
        workers = {int(one["pid"]): str(one["id"]) for one in self.state["slices"] if one["pid"]}
        at_s = time.monotonic() - self._began_s
        self._memory.look(at_s, self._server.processes(workers), gpu_used_bytes())

    def memory(self) -> dict[str, Any]:
        """For the summary, once memory is judged."""
        found, grown = self._memory.judged()
        for name, expected, came in grown:
            self._findings.violation(f"memory grows: {name}", expected, came)
        return found

    # ---- log ------------------------------------------------------------------------------------

    def _errors(self) -> None:
        """Lines of level error that nothing explains, and lines that are no log at all."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._read += len(line)
            self._line(line.decode(errors="replace").rstrip())

    def _line(self, line: str) -> None:
        try:
            entry = json.loads(line) if line.startswith("{") else None
        except ValueError:
            entry = None
        if entry is None:
            if line and "Traceback" in line:
                self._findings.violation("a traceback outside the log", "none", line)
            return
        if entry["level"] not in ("error", "critical") and "exception" not in entry:
            return
        if not self._explained(entry["message"]):
            self._findings.violation("an error in the log", "none", entry)

    def _explained(self, message: str) -> bool:
        """Workers that end because they were killed, and those of their GPU; what found the pool's
        filesystem full."""
        now = time.monotonic()
        if self._moments.full(now - _SEEN_S, now) and any(said in message for said in _OF_FULL):
            return True
        recent = time.monotonic() - self._ended_s < 60.0
        match = _OF_WORKER.match(message)
        if match is None:
            return recent and message.startswith(_OF_HOUSE)
        if int(match[2]) in self._ended:
            return True
        green = [one["id"] for one in self.state["slices"] if one["kind"] == "green"]
        return recent and match[1] in green

    def health(self) -> dict[str, float]:
        """Seconds that `/health` took, of all looks so far. docs/operations.md has a limit for the
        99th percentile on a machine that does nothing else; here it is only told."""
        ordered = sorted(self._health_s)
        return {
            "looks": len(ordered),
            "p50": round(median(ordered), 4),
            "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
            "slowest": round(ordered[-1], 4),
        }

    # ---- afterwards -----------------------------------------------------------------------------

    def idle(self) -> list[str]:
        """What is held although nothing is asked."""
        state = self._server.state()
        held = [f"{name} is {state[name]}" for name in ("running", "waiting") if state[name]]
        for one in state["slices"]:
            names = ("running", "waiting", "kv_used_bytes", "kv_host_bytes")
            held += [f"{one['id']}: {name} is {one[name]}" for name in names if one[name]]
        return held

    def last_errors(self) -> None:
        self._errors()


def _model_of(sample: str) -> str | None:
    match = _MODEL.search(sample)
    return match and match[1]
