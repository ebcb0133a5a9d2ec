"""The bare engine in one process: segment, slice policy and executor; no server, no sockets."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from c2cserve.core.events import Activated, SliceEvent, Submitted
from c2cserve.core.machine import Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Delta, Job, Request, Sampling, Slo
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor
from c2cserve.engine.models.config import parse_config, read_config
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.models.layout import plan_layout
from c2cserve.engine.weights import Weights
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.checkpoint import find_files, open_checkpoint, read_header
from c2cserve.memory.loader import Loader
from c2cserve.memory.segment import Segment, remove_segment
from c2cserve.policy.slice.policy import SlicePolicy


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0


class LocalEngine:
    """One slice; `run` answers prompts greedily with continuous batching."""

    def __init__(
        self, checkpoint: Path, cpus: Sequence[int], kv_bytes: int = 1 << 30, models: int = 1
    ) -> None:
        """`models`: how many there are, all of them the same checkpoint under other names."""
        self.models = [f"{checkpoint.name}-{i}" for i in range(models)]
        self.slice = Slice("cpu0", "cpu", tuple(cpus), kv_bytes=kv_bytes)
        config = parse_config(read_config(checkpoint))
        names = frozenset(n for file in find_files(checkpoint) for n in read_header(file))
        plan = plan_layout(config, names)
        sources = open_checkpoint(checkpoint, plan)
        self._segment_path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="c2cserve-bench-")) / "m"
        segment = Segment.create(self._segment_path, plan, sources)
        Loader(segment, plan, sources).run()
        self.policy = SlicePolicy(self.slice)
        self._events: list[SliceEvent] = []
        self._answers: dict[str, Answer] = {}
        ops = CpuOps(len(cpus), cpus)
        self.executor = Executor("cpu0", ops, make_arena(kv_bytes), self._report, time.monotonic)
        for model in self.models:
            weights = Weights(Segment.open(self._segment_path))
            self.executor.attach(model, Decoder(config, weights, config.max_position))
            spec = ModelSpec(
                model, plan.bytes, config.layers, config.kv_block_bytes, config.max_position
            )
            self._events.append(Activated(spec))
        self._count = 0

    def close(self) -> None:
        remove_segment(self._segment_path)
        self._segment_path.parent.rmdir()

    def _report(self, event: SliceEvent | None, deltas: Sequence[Delta]) -> None:
        if event is not None:
            self._events.append(event)
        now = time.perf_counter()
        for delta in deltas:
            answer = self._answers[delta.request_id]
            answer.tokens += delta.tokens
            answer.first_s = answer.first_s or now
            answer.last_s = now

    def run(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Answer]:
        """All prompts at once, the models taking turns; answer i has lengths[i] tokens."""
        answers: list[Answer] = []
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            self._count += 1
            model = self.models[i % len(self.models)]
            request = Request(
                str(self._count), model, len(prompt), length, time.monotonic(), Slo(1e6, 1e6),
            )  # fmt: skip
            job = Job(request, tuple(prompt), Sampling(seed=0, temperature=0.0))
            self.executor.add(job)
            self._events.append(Submitted(request))
            answers.append(Answer())
            self._answers[request.id] = answers[-1]
        while True:
            events = list(self._events)
            self._events.clear()
            for event in events:
                self.policy.apply(event)
            actions = self.policy.decide(time.monotonic())
            if not actions and not events:
                return answers
            for action in actions:
                self.executor.submit(action)
