"""A slice without a policy: an executor that tests drive step by step, and segments that load when
the test says so."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from engine_reports import EngineReports
from torch import Tensor

from c2cserve.core.actions import Drop, Fail, RunStep, Truncate
from c2cserve.core.events import StepDone, StepFailed, StepParked
from c2cserve.core.request import BLOCK_TOKENS, Job, Request, Sampling
from c2cserve.core.step import Lane as LaneName
from c2cserve.core.step import SeqStep, Step
from c2cserve.core.tensors import ITEM_BYTES
from c2cserve.engine.cpu.arena import make_arena
from c2cserve.engine.executor import Executor
from c2cserve.engine.lanes import LaneParts
from c2cserve.engine.models.config import parse_config, read_config
from c2cserve.engine.models.decoder import Decoder, ForwardBatch
from c2cserve.engine.models.layout import plan_layout
from c2cserve.engine.moved import MovedBytes, nothing_moved
from c2cserve.engine.parked import Arrived
from c2cserve.engine.weights import Weights
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.kernels.ops import Ops
from c2cserve.memory.checkpoint import find_files, open_checkpoint, read_header
from c2cserve.memory.loader import Loader
from c2cserve.memory.segment import Segment, State

GREEDY = Sampling(seed=0, temperature=0.0)
_GENERATION = itertools.count()


class LateModel:
    """A checkpoint in a segment of its own; `load` makes groups ready, nothing is before."""

    def __init__(
        self, checkpoint: Path, max_context: int = 256, *, device: torch.device | None = None,
        open_: Callable[[Path], Segment] = Segment.open,
    ) -> None:  # fmt: skip
        self.config = parse_config(read_config(checkpoint))
        names = frozenset(name for file in find_files(checkpoint) for name in read_header(file))
        self.plan = plan_layout(self.config, names)
        self.sources = open_checkpoint(checkpoint, self.plan)
        stem = f"segment.{next(_GENERATION)}"
        self._whole = Segment.create(checkpoint / f"{stem}.whole", self.plan, self.sources)
        Loader(self._whole, self.plan, self.sources).run()
        self.path = checkpoint / stem
        self.segment = Segment.create(self.path, self.plan, self.sources)
        self.decoder = Decoder(self.config, Weights(open_(self.path)), max_context, device)

    def load(self, names: Iterable[str]) -> None:
        """Bring these groups in."""
        for name in names:
            group = self.segment.group(name)
            for part in self.plan.groups[group].parts:
                place = self.segment.tensors[part.target]
                item = ITEM_BYTES[place.dtype]
                begin, end = part.offset * item, (part.offset + part.elements) * item
                data = self._whole.raw(part.target)[begin:end].tobytes()
                self.segment.write(place.offset + begin, memoryview(data))
            self.segment.set_ready(group)
        if all(self.segment.ready(group) for group in range(len(self.plan.groups))):
            self.segment.state = State.READY

    def load_all(self) -> "LateModel":
        self.load(group.name for group in self.plan.groups)
        return self

    @property
    def wanted(self) -> list[str]:
        """Groups asked for that are not there yet."""
        flags = ((self.segment.wanted(i), self.segment.ready(i)) for i in itertools.count())
        return [
            group.name
            for group, (wanted, ready) in zip(self.plan.groups, flags, strict=False)
            if wanted and not ready
        ]


class Lane(EngineReports):
    """An executor, its clock (one second a reading), and what came of the steps."""

    def __init__(
        self, ops: Ops | None = None, kv_bytes: int = 16 << 20, *, arena: Tensor | None = None,
        to_device: Callable[[ForwardBatch], ForwardBatch] | None = None,
        fatal: tuple[type[Exception], ...] = (), renew: Callable[[], None] | None = None,
        streaming: LaneParts | None = None, moved: Callable[[], MovedBytes] = nothing_moved,
        arrived: Arrived = lambda _: None,
    ) -> None:  # fmt: skip
        super().__init__()
        ticks = itertools.count()
        self.executor = Executor(
            "lane", ops or CpuOps(1), make_arena(kv_bytes) if arena is None else arena,
            self.report, lambda: float(next(ticks)), to_device=to_device,
            fatal=lambda fault: isinstance(fault, fatal), renew=renew, streaming=streaming,
            moved=moved, arrived=arrived,
        )  # fmt: skip
        self._steps = itertools.count()
        self._taken = 0
        self._next_block = 0
        self._block_bytes: dict[str, int] = {}
        self._model_of: dict[str, str] = {}
        self._known: dict[str, int] = {}
        self._blocks: dict[str, list[int]] = {}
        self._told: dict[str, int] = {}

    def attach(self, name: str, decoder: Decoder) -> None:
        self.executor.attach(name, decoder)
        self._block_bytes[name] = decoder.kv.block_bytes

    def add(
        self, name: str, model: str, tokens: list[int], max_new: int = 8,
        sampling: Sampling = GREEDY, sent: int = 0,
    ) -> None:  # fmt: skip
        request = Request(name, model, len(tokens), max_new, 0.0, sent=sent)
        self.executor.add(Job(request, tuple(tokens), sampling))
        self._model_of[name], self._known[name] = model, len(tokens)
        self._blocks[name], self._told[name] = [], -1

    def share(self, name: str, other: str, tokens: int) -> None:
        """Begin with the other's first full blocks."""
        self._blocks[name] = self._blocks[other][: tokens // BLOCK_TOKENS]

    def step(self, *parts: tuple[str, int, int]) -> StepDone | StepFailed | StepParked:
        """One step of (request, start, tokens) parts of one model."""
        before = len(self.events)
        step_id = self.launch(*parts)
        while len(self.events) == before:  # a GPU takes its time
            self.executor.poll()
        (event,) = self.events[before:]
        assert isinstance(event, StepDone | StepFailed | StepParked)
        assert event.step_id == step_id
        if isinstance(event, StepDone):
            self.note(event)
        return event

    def launch(self, *parts: tuple[str, int, int], lane: LaneName = "resident") -> int:
        """Submit a step, and do not wait for its end. Return its id."""
        model = self._model_of[parts[0][0]]
        seqs = tuple(self._part(*part) for part in parts)
        step = Step(next(self._steps), model, seqs, lane=lane)
        self.executor.submit(RunStep(step))
        return step.id

    def take_done(self) -> list[StepDone]:
        """Poll; return the steps that have ended since this was asked last."""
        self.executor.poll()
        done: list[StepDone] = []
        for event in self.events[self._taken :]:
            assert not isinstance(event, StepFailed), event.reason
            if isinstance(event, StepDone):
                done.append(event)
        self._taken = len(self.events)
        for one in done:
            self.note(one)
        return done

    def failed(self, *parts: tuple[str, int, int]) -> str:
        """Why a step fails. Its requests are not told, and begin anew with their next one."""
        event = self.step(*parts)
        assert isinstance(event, StepFailed)
        for name, _, _ in parts:
            assert not self.ended(name)
            self.preempt(name)
        return event.reason

    def land(self) -> StepDone:
        """What comes of a step that was parked, once all its weights are there."""
        while not isinstance(self.events[-1], StepDone):
            self.executor.poll()
        done = self.events[-1]
        assert isinstance(done, StepDone)
        self.note(done)
        return done

    def _part(self, name: str, start: int, tokens: int) -> SeqStep:
        blocks = self._blocks[name]
        while len(blocks) * BLOCK_TOKENS < start + tokens:
            blocks.append(self._next_block)
            self._next_block += self._block_bytes[self._model_of[name]]
        fresh = self._told[name] < 0
        new = tuple(blocks[max(0, self._told[name]) :])
        self._told[name] = len(blocks)
        return SeqStep(name, start, tokens, new, fresh, start + tokens >= self._known[name])

    def note(self, done: StepDone) -> None:
        """Take a step's outcomes into account (a parked one's end comes by `poll`)."""
        for outcome in done.outcomes:
            self._known[outcome.request_id] += outcome.drawn

    def preempt(self, name: str) -> None:
        self.executor.submit(Drop(name, requeued=True))
        self._blocks[name], self._told[name] = [], -1

    def fail(self, name: str, reason: str) -> None:
        self.executor.submit(Fail(name, reason))

    def drop(self, name: str) -> None:
        self.executor.submit(Drop(name))

    def truncate(self, name: str) -> None:
        self.executor.submit(Truncate(name))

    def finish(self, *names: str) -> None:
        """Prefill what is not, then decode all together to the end."""
        for name in names:
            self.step((name, 0, self._known[name]))
        while left := [name for name in names if not self.ended(name)]:
            self.step(*((name, self._known[name] - 1, 1) for name in left))
