"""A run: the catalogue, then phase after phase, each with a server of its own."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from catalogue_server import Server, ServerFailed

from soak.catalogue import Catalogue
from soak.chaos import Chaos
from soak.checkpoints import BadCheckpoints
from soak.client import Client
from soak.comparing import Asked, Checker
from soak.filling import Filler
from soak.findings import Findings
from soak.hostile import Hostile
from soak.judge import Judge, Tally
from soak.kinds import Sampler
from soak.load import Load, Wave
from soak.memory import Memory
from soak.moments import Moments
from soak.phases import Phase, Setting, eased
from soak.watch import Watch

_DRAIN_S = 60.0
"""`serve --drain-timeout`."""
_EXIT_S = 15.0
"""After what was running has ended, for the server and its workers to go."""
_IDLE_S = 10.0
"""After the last answer, until nothing is held."""
_SHORT_TIMES = (
    "--text-timeout", "5", "--head-timeout", "5", "--body-timeout", "5", "--idle-timeout", "10",
    "--send-timeout", "10",
)  # fmt: skip
"""So that what attacks wait for comes within a phase."""
_LEFT_RUNNING = 12
"""Requests under way when the server is told to end."""


@dataclass(frozen=True, slots=True)
class Plan:
    setting: Setting
    phases: tuple[Phase, ...]
    seed: int
    gpu: bool
    until_s: float
    """On the clock of `time.monotonic`: the last phase ends about then."""
    judge_gpu_memory: bool
    pool: Path
    filled: Path | None
    """The root of the filesystem that the pool has to itself; None: it shares one with others, and
    is never filled."""
    bad: Path
    """Where bad checkpoints are made."""
    out: Path
    profile: tuple[str, ...] = ()
    """More arguments of `serve`: where picks of dataflows come from."""


class Run:
    def __init__(
        self, plan: Plan, catalogue: Catalogue, findings: Findings, tell: Callable[[str], None]
    ) -> None:
        self._plan, self._catalogue = plan, catalogue
        self._findings, self._tell = findings, tell
        self._moments = Moments()
        self._judge = Judge(findings, self._moments)
        rng = random.Random(f"{plan.seed} checker")
        self._checker = Checker(findings, self._judge, self._moments, rng, plan.gpu)
        self.phases: list[dict[str, Any]] = []

    def all_phases(self) -> None:
        """Each gets its share of the time that is left. A server that fails ends its phase."""
        phases = self._plan.phases
        for number, phase in enumerate(phases):
            left_s = self._plan.until_s - time.monotonic()
            end_s = time.monotonic() + left_s / (len(phases) - number)
            self._findings.phase = phase.name
            self._tell(f"phase {phase.name}: serve {' '.join(phase.arguments)}")
            row: dict[str, Any] = {"name": phase.name, "arguments": phase.arguments}
            self.phases.append(row)
            self._moments.draining_s = float("inf")
            self._judge.tally = Tally()
            try:
                self._phase(number, phase, end_s, row)
            except (ServerFailed, OSError) as error:
                came = f"{type(error).__name__}: {error}"
                self._findings.violation("the server", "serves until it is told to end", came)

    def _phase(self, number: int, phase: Phase, end_s: float, row: dict[str, Any]) -> None:
        log = self._plan.out / f"server-{number}.log"
        budget = max(
            int(phase.pool_share * self._catalogue.weight_bytes),
            self._catalogue.largest.weight_bytes,
        ) + (64 << 10)
        arguments = [
            *phase.arguments, *self._plan.profile, "--pool-dir", str(self._plan.pool),
            "--model-root", str(self._plan.bad),
            "--pool-bytes", str(budget), "--drain-timeout", str(_DRAIN_S),
            "--hang-timeout", str(self._plan.setting.trouble.hang_timeout_s), *_SHORT_TIMES,
        ]  # fmt: skip
        began_s = time.monotonic()
        with Server(self._catalogue.file, log, arguments) as server:
            server.wait_ready(
                self._plan.setting.ready_s, self._tell, all_loaded=phase.pool_share >= 1.0
            )
            row["start_s"] = round(time.monotonic() - began_s, 2)
            self._tell(f"the server is up after {row['start_s']} s")
            memory = Memory(
                self._plan.out / f"memory-{number}.csv", phase.arena_bytes,
                judge_gpu=self._plan.judge_gpu_memory,
            )  # fmt: skip
            stay = [model.id for model in self._catalogue.models]
            watch = Watch(
                server, log, self._plan.pool, self._findings, self._moments, memory, stay
            )  # fmt: skip
            asyncio.run(self._serve(number, phase, server, watch, end_s, row))
            self._gone(server, watch)

    async def _serve(
        self, number: int, phase: Phase, server: Server, watch: Watch, end_s: float,
        row: dict[str, Any],
    ) -> None:  # fmt: skip
        setting, rng = self._plan.setting, random.Random(f"{self._plan.seed} {number}")
        self._checker.now_on(phase.layout)
        async with Client(server.url, setting.end_s) as client:
            load = Load(
                client, self._catalogue.models, self._judge, rng, eased(setting.bounds, phase.ease),
                f"s{self._plan.seed}-{number}",
            )  # fmt: skip
            watching = asyncio.create_task(watch.run())
            for case in load.make_bank(setting.bank_each):
                if not self._plan.gpu or case.kind == "calm":
                    await self._checker.ask_alone(client, case)
            began_s = time.monotonic()
            load_end_s = began_s + (1 - setting.check_share) * max(5.0, end_s - began_s)
            chaos_rng = random.Random(f"{self._plan.seed} {number} chaos")
            bad_rng = random.Random(f"{self._plan.seed} {number} bad checkpoints")
            bad = BadCheckpoints(
                server.url, self._plan.bad / str(number), self._judge, self._findings, bad_rng
            )
            filler = Filler(self._plan.filled) if self._plan.filled else None
            chaos = Chaos(
                server.url, setting.trouble, self._catalogue.models, load, watch, self._findings,
                self._moments, chaos_rng, bad, filler,
            )  # fmt: skip
            hostile_rng = random.Random(f"{self._plan.seed} {number} hostile")
            hostile = Hostile(
                server.url, self._catalogue.models, self._judge, self._findings, hostile_rng,
                setting.end_s,
            )  # fmt: skip
            await self._loaded(load, chaos, hostile, load_end_s, watching)
            await self._idle(watch)
            self._counted(watch)
            row["answers"] = len(load.asked)
            row["memory"] = watch.memory()
            await self._checker.check(client, load.asked, end_s)
            await self._every_model(client, rng)
            row["health_s"] = watch.health()
            await self._drain(server, load, watching)

    async def _loaded(
        self, load: Load, chaos: Chaos, hostile: Hostile, end_s: float,
        watching: asyncio.Task[None],
    ) -> None:  # fmt: skip
        attacking = asyncio.create_task(hostile.run(self._plan.setting.trouble.attackers))
        troubling = asyncio.create_task(chaos.run())
        loading = asyncio.create_task(load.run(end_s, self._note))
        tasks = {loading, troubling, attacking, watching}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await _ended(troubling)
        await hostile.finish(attacking)
        if watching.done():  # by itself: the server has failed
            await _ended(loading)
            await watching
        await loading
        await chaos.finish()

    def _note(self, wave: Wave) -> None:
        self._findings.events[f"wave: {wave.name}"] += 1

    async def _idle(self, watch: Watch) -> None:
        """Nothing is asked: nothing may be held, and every slice comes back."""
        until_s = time.monotonic() + _IDLE_S
        held: list[str] = ["not looked"]
        while held and time.monotonic() < until_s:
            await asyncio.sleep(0.2)
            held = await asyncio.to_thread(watch.idle)
        await asyncio.to_thread(watch.refresh)
        if held:
            self._findings.violation("held while idle", "nothing", held)
        back_s = time.monotonic() + self._plan.setting.ready_s
        while any(one["state"] != "up" for one in watch.state["slices"]):
            if time.monotonic() > back_s:
                states = {one["id"]: one["state"] for one in watch.state["slices"]}
                self._findings.violation("slices come back", "all up", states)
                return
            await asyncio.sleep(0.2)

    def _counted(self, watch: Watch) -> None:
        """The server's counters against what its clients saw."""
        tally = self._judge.tally
        ended = sum(
            watch.counted("vllm:request_success_total", f'finished_reason="{reason}"')
            for reason in ("stop", "length")
        )
        if not tally.ended <= ended <= tally.ended + tally.left:
            expected = f"{tally.ended} to {tally.ended + tally.left}"
            self._findings.violation("counted: requests that ended", expected, ended)
        output = watch.counted("vllm:generation_tokens_total")
        if output < tally.output_tokens:
            expected = f"at least {tally.output_tokens}"
            self._findings.violation("counted: tokens", expected, output)

    async def _every_model(self, client: Client, rng: random.Random) -> None:
        """At the end each of them answers: twice the same, with no load."""
        for model in self._catalogue.models:
            draw = Sampler(rng, model, self._plan.setting.bounds.limits, families=1)
            made = draw.simple("at the end", 5, max_tokens=8, logprobs=0)
            case = replace(made, id=f"end-{model.id}")
            reply = await client.ask(case)
            if self._judge.judge(case, reply):
                await self._checker.check(client, [Asked(case, reply, 5)], float("inf"))

    async def _drain(self, server: Server, load: Load, watching: asyncio.Task[None]) -> None:
        """SIGTERM in the middle of answers: they end well, what comes later is refused."""
        running = asyncio.create_task(load.some(_LEFT_RUNNING))
        await asyncio.sleep(0.3)
        self._moments.draining_s = time.monotonic()
        server.terminate()
        await asyncio.sleep(0.05)
        late = asyncio.create_task(load.late(4))
        await running
        await late
        await _ended(watching)

    def _gone(self, server: Server, watch: Watch) -> None:
        """After SIGTERM and the last answer: exit status 0, and nothing is left."""
        pids = server.pids
        status = server.wait(_DRAIN_S + _EXIT_S - (time.monotonic() - self._moments.draining_s))
        if status != 0:
            self._findings.violation("exit", "status 0, in time", status)
        watch.last_errors()
        left = sorted(path.name for path in self._plan.pool.iterdir())
        instance = watch.state.get("instance", "?")
        left += [path.name for path in Path("/dev/shm").glob(f"*{instance}*")]
        if left:
            self._findings.violation("left in shared memory", "nothing", left)
        alive = [pid for pid in pids if status is not None and Path(f"/proc/{pid}").exists()]
        if alive:
            self._findings.violation("processes that outlive the server", "none", alive)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel it; what it failed of is raised."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
