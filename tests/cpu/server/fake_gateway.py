"""Everything behind the HTTP server, played by a script: tokens, delays, refusals, failures."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from c2cserve.core.model import ModelState, ModelStatus
from c2cserve.core.request import Delta, FinishReason, Job, Timing, TokenLogprob
from c2cserve.runtime.gateway import ModelFiles, Refused, SliceStatus, Snapshot

TIMING = Timing(
    "cpu0", switched=True, queue_s=0.002, switch_s=0.0005, wait_weights_s=0.25, prefill_s=0.004
)


@dataclass(frozen=True)
class Play:
    """What one job does. `tokens` that reach the job's limit or one of its stop tokens end there,
    as an engine would end them."""

    tokens: Sequence[int] = ()
    per_delta: int = 1
    delay_s: float = 0.0
    cached_tokens: int = 0
    refuse: Refused | None = None
    fail_after: int | None = None
    """Deltas sent before the job fails."""
    forever: bool = False
    """Repeat the tokens until cancelled."""


@dataclass
class FakeGateway:
    files: dict[str, ModelFiles]
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    play: Callable[[Job], Play] = lambda job: Play()
    jobs: list[Job] = field(default_factory=list[Job])
    cancelled: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])
    """Jobs whose iterator is over, whether read to the end or closed."""
    admin_calls: list[tuple[str, object]] = field(default_factory=list[tuple[str, object]])
    overloaded: Refused | None = None
    may_be_refused: bool = False
    """Whether there is an overload, of which nothing need be refused."""
    gated: list[tuple[str, float, dict[str, int]]] = field(
        default_factory=list[tuple[str, float, dict[str, int]]]
    )
    """What `overload` was asked."""
    admin_refusal: Refused | None = None
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    ready: bool = True
    healthy: bool = True
    draining: bool = False

    def resolve(self, name: str) -> ModelFiles | None:
        return self.files.get(self.aliases.get(name, name))

    def overload(
        self, model: str, tenant: str, ttft_s: float, arrived_s: float,
        preparing: Mapping[str, int],
    ) -> Refused | None:  # fmt: skip
        self.gated.append((tenant, ttft_s, dict(preparing)))
        return self.overloaded

    @property
    def may_refuse(self) -> bool:
        return self.may_be_refused or self.overloaded is not None

    async def submit(self, jobs: Sequence[Job]) -> AsyncIterator[Delta]:
        queue: asyncio.Queue[Delta | Refused] = asyncio.Queue()
        tasks = [asyncio.create_task(self._run(job, queue)) for job in jobs]
        self._tasks |= {job.request.id: task for job, task in zip(jobs, tasks, strict=True)}
        left = len(jobs)
        try:
            while left:
                item = await queue.get()
                if isinstance(item, Refused):
                    raise item
                left -= item.finish is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, queue: "asyncio.Queue[Delta | Refused]") -> None:
        try:
            play = self.play(job)
            self.jobs.append(job)
            if play.refuse is not None:
                queue.put_nowait(play.refuse)
                return
            async for delta in _deltas(job, play):
                queue.put_nowait(delta)
        finally:
            self.ended.append(job.request.id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._tasks[request_id].cancel()

    def models(self) -> Sequence[ModelStatus]:
        return [
            ModelStatus(
                id=one.id, aliases=tuple(a for a, m in self.aliases.items() if m == one.id),
                state=ModelState.READY, max_context=one.max_context, weight_bytes=1000,
                loaded_bytes=1000, pinned=False, priority=0, active_slices=("cpu0",), running=2,
                waiting=3, created_s=1_700_000_000,
            )
            for one in self.files.values()
        ]  # fmt: skip

    def snapshot(self) -> Snapshot:
        one = SliceStatus(
            id="cpu0", kind="cpu", state="up", pid=1, cpus=(0,), restarts=1, running=2, waiting=3,
            active_models=tuple(self.files), last_model=next(iter(self.files), ""),
            kv_used_bytes=25, kv_total_bytes=100, steps=70, switches=7, busy_share=0.5,
            prompt_tokens=500, output_tokens=600, cached_tokens=50, preemptions=4,
            heartbeat_age_s=0.1, flash_steps=31, flash_missed_steps=37,
        )  # fmt: skip
        return Snapshot(
            instance="test", started_s=1.0, draining=self.draining, slices=(one,),
            models=tuple(self.models()), pool_used_bytes=3000, pool_budget_bytes=9000, running=2,
            waiting=3, counters={"rejected_429": 5, "slice_lost": 1},
        )  # fmt: skip

    async def add_model(self, entry: dict[str, object]) -> ModelStatus:
        self._admin("add", entry)
        name = str(entry["id"])
        self.files[name] = replace(next(iter(self.files.values())), id=name)
        return self._status(name)

    async def remove_model(self, name: str) -> None:
        self._admin("remove", name)
        self.files.pop(name)

    async def reload_model(self, name: str) -> ModelStatus:
        self._admin("reload", name)
        return self._status(name)

    def _admin(self, what: str, argument: object) -> None:
        if self.admin_refusal is not None:
            raise self.admin_refusal
        self.admin_calls.append((what, argument))

    def _status(self, name: str) -> ModelStatus:
        return next(status for status in self.models() if status.id == name)


async def _deltas(job: Job, play: Play) -> AsyncIterator[Delta]:
    request, sampling = job.request, job.sampling
    tokens, finish = _cut(play.tokens, job)
    groups = [tokens[i : i + play.per_delta] for i in range(0, len(tokens), play.per_delta)] or [()]
    sent = 0
    while True:
        for i, group in enumerate(groups):
            await asyncio.sleep(play.delay_s)
            if play.fail_after == sent:
                yield Delta(request.id, finish=FinishReason.ERROR, error="the weights are gone")
                return
            last = i == len(groups) - 1 and not play.forever
            yield Delta(
                request.id,
                tokens=tuple(group),
                logprobs=() if sampling.logprobs is None else _logprobs(group, sampling.logprobs),
                prompt_logprobs=_prompt_logprobs(job) if sent == 0 else (),
                finish=finish if last else None,
                cached_tokens=play.cached_tokens if sent == 0 else 0,
                timing=TIMING if sent == 0 else None,
            )
            sent += 1
            if last:
                return


def _cut(tokens: Sequence[int], job: Job) -> tuple[tuple[int, ...], FinishReason]:
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in job.sampling.stop_token_ids:
            return tuple(kept), FinishReason.STOP
        if len(kept) == job.request.max_new_tokens:
            break
    return tuple(kept), FinishReason.LENGTH


def _logprobs(tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Made-up values that tell tokens apart: the chosen token is the likeliest."""
    return tuple(
        TokenLogprob(t, -t / 1024, tuple((t + j, -(t + j) / 1024) for j in range(top)))
        for t in tokens
    )


def _prompt_logprobs(job: Job) -> tuple[TokenLogprob, ...]:
    if job.sampling.prompt_logprobs is None:
        return ()
    return _logprobs(job.tokens[1:], job.sampling.prompt_logprobs)


def model_files(name: str, path: Path, *, vocab: int, max_context: int = 256) -> ModelFiles:
    return ModelFiles(
        id=name, path=str(path), max_context=max_context, vocab_size=vocab, eos_token_ids=(2,),
        ttft_s=1.0, tpot_s=0.1, priority=3, tables=str(path / "tables"),
    )  # fmt: skip
