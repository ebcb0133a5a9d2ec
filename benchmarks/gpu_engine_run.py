"""A slice's engine in one process, without policy or server: models over pieces of a buffer at
some home, an executor, and steps as the policy would make them."""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from c2cserve.core.actions import Drop, RunStep
from c2cserve.core.events import SliceEvent, StepDone, StepFailed
from c2cserve.core.request import BLOCK_TOKENS, Delta, Job, Request, Sampling
from c2cserve.core.step import SeqStep, Step
from c2cserve.engine.executor import Executor
from c2cserve.engine.gpu.ops import GpuOps, Multiply
from c2cserve.engine.models.config import ModelConfig
from c2cserve.engine.models.decoder import Decoder, ForwardBatch
from c2cserve.engine.models.layout import plan_layout
from c2cserve.engine.parked import Arrived
from c2cserve.engine.weights import Weights
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.kernels.layer import KvLayout, Layer, LayerShape, LayerWeights, Mlp
from c2cserve.memory.segment import TensorPlace, place_tensors

_GREEDY = Sampling(seed=0, temperature=0.0)
_TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Machine(Protocol):
    """What a run needs of a GPU; `gpu_machine.Gpu`, and in tests a machine without one."""

    device: torch.device
    arena: Tensor
    host_sampler: Any
    staging: Any
    flash: Any
    """Attention of long prompts, of the slice; None: our kernel's."""

    def synchronize(self) -> None: ...

    def mark(self) -> Any:
        """A point in the current stream's work."""
        ...

    def elapsed_s(self, begin: Any, end: Any) -> float: ...

    def capture_decoding(self, ops: GpuOps, linear: Any, cache: Any) -> None: ...


class BufferWeights:
    """`engine.weights.Weights`, all of it loaded, as a piece of a buffer laid out like a segment.

    Matrices are what the buffer holds there; norms are set to 1. Models may overlap: a pass reads
    gigabytes before it comes to the same bytes again, so nothing is found in a cache for it."""

    complete = True

    def __init__(self, config: ModelConfig, buffer: Tensor, offset: int) -> None:
        plan = plan_layout(config)
        self._buffer = buffer
        self._places, end = place_tensors(plan, offset)
        if end > buffer.numel():
            raise ValueError(f"a model of {plan.bytes} bytes at {offset} leaves its buffer")
        self.bytes = plan.bytes
        self._groups = {group.name: index for index, group in enumerate(plan.groups)}
        for name, place in self._places.items():
            if len(place.shape) == 1:
                self.tensor(name).fill_(1.0)

    def tensor(self, name: str) -> Tensor:
        place: TensorPlace = self._places[name]
        dtype = _TORCH[place.dtype]
        count = 1
        for extent in place.shape:
            count *= extent
        raw = self._buffer[place.offset : place.offset + count * dtype.itemsize]
        return raw.view(dtype).view(place.shape)

    def has(self, name: str) -> bool:
        return name in self._places

    def group(self, name: str) -> int:
        return self._groups[name]

    def missing(self, groups: Iterable[int]) -> list[int]:
        return []

    def want(self, groups: Iterable[int]) -> None: ...


@dataclass(slots=True)
class Counted:
    """Of one step's GEMMs: bytes of weights that are read (of experts the chosen ones'), and
    operations."""

    bytes: float = 0.0
    flops: float = 0.0


class Watched:
    """`engine.gpu.ops.Multiply` that notes when a step's first GEMM may begin, and, in a step that
    is not timed, what all of them read."""

    def __init__(self, multiply: Multiply, machine: Machine) -> None:
        self._multiply = multiply
        self._machine = machine
        self._armed = False
        self.first: Any = None
        """The mark before the first GEMM since `arm`."""
        self._counted: Counted | None = None
        self._chosen: list[tuple[WeightHandle, Tensor]] = []

    def arm(self) -> None:
        self._armed, self.first = True, None

    def __call__(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        self._note(x, w)
        return self._multiply(x, w, bias)

    def gated(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        self._note(x, w)
        return self._multiply.gated(x, w, bias)

    def experts(self, x: Tensor, w: WeightHandle, offsets: Tensor, top_k: int) -> Tensor:
        self._note(x, w, offsets)
        return self._multiply.experts(x, w, offsets, top_k)

    def _note(self, x: Tensor, w: WeightHandle, offsets: Tensor | None = None) -> None:
        if self._armed:
            self._armed, self.first = False, self._machine.mark()
        if self._counted is None:
            return
        self._counted.flops += 2.0 * x.shape[0] * w.n * w.k
        if offsets is None:
            self._counted.bytes += w.bytes
        else:
            self._chosen.append((w, offsets))

    def begin_count(self) -> None:
        self._counted, self._chosen = Counted(), []

    def end_count(self) -> Counted:
        counted, self._counted = self._counted, None
        assert counted is not None
        for w, offsets in self._chosen:
            chosen = int((offsets[1:] > offsets[:-1]).sum())
            counted.bytes += w.bytes * chosen / w.experts
        self._chosen = []
        return counted


@dataclass(slots=True)
class _Talk:
    model: str
    known: int
    blocks: list[int]
    started: bool = False


class Engine:
    """Steps are timed from asking to their last token being on the host."""

    def __init__(
        self, machine: Machine, multiply: Multiply, cache: Any = None, *, graphs: bool = True,
        pause_s: float = 0.0, arrived: Arrived = lambda _: None,
    ) -> None:  # fmt: skip
        """`cache`: what `multiply` keeps weights in; without `graphs` every kernel is launched.
        `pause_s`: between two looks at a step, where other threads have something to do.
        `arrived`: which layers have, of models that are being loaded."""
        self.machine = machine
        self._pause_s = pause_s
        self.watch = Watched(multiply, machine)
        self.ops = GpuOps(self.watch, machine.device, machine.host_sampler, flash=machine.flash)
        self._cache = cache
        if graphs:
            machine.capture_decoding(self.ops, multiply, cache)
        self.arena = machine.arena
        self._events: list[SliceEvent] = []
        self._deltas: list[Delta] = []
        self.executor = Executor(
            "bench", self.ops, self.arena, self._report, time.perf_counter,
            to_device=machine.staging, arrived=arrived,
        )  # fmt: skip
        self._kv: dict[str, KvLayout] = {}
        self._vocab: dict[str, int] = {}
        self._talks: dict[str, _Talk] = {}
        self._next_block = 0
        self._made = self._steps = 0
        self._random = random.Random(7)

    def attach(self, model: str, config: ModelConfig, buffer: Tensor, offset: int = 0) -> Decoder:
        weights = BufferWeights(config, buffer, offset)
        decoder = Decoder(
            config, cast("Weights", weights), config.max_position, self.machine.device
        )
        self.executor.attach(model, decoder)
        self._kv[model], self._vocab[model] = decoder.kv, config.vocab
        if self._cache is not None:
            self._cache.add(model, buffer.data_ptr() + offset, weights.bytes)
        return decoder

    def detach(self, model: str) -> None:
        self.executor.detach(model)

    def talk(self, model: str, prompt: int, count: int = 1) -> list[str]:
        """Requests with random prompts of that length, not begun."""
        return [self.talk_about(model, self.prompt(model, prompt)) for _ in range(count)]

    def prompt(self, model: str, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab[model]) for _ in range(length))

    def talk_about(self, model: str, prompt: tuple[int, ...]) -> str:
        """A request with this prompt, not begun."""
        self._made += 1
        name = f"r{self._made}"
        request = Request(name, model, len(prompt), 4096, 0.0)
        self.executor.add(Job(request, prompt, _GREEDY))
        self._talks[name] = _Talk(model, len(prompt), [])
        return name

    def step(self, names: Sequence[str]) -> float:
        """Seconds of one step of all: their prompts, or one token each. Raises RuntimeError if it
        fails."""
        self._begin()
        begin_s = time.perf_counter()
        self._submit(names)
        self._until_done(1)
        return time.perf_counter() - begin_s

    def decode(self, names: Sequence[str], steps: int) -> list[float]:
        """Seconds from step to step, the next one planned and launched while this one runs, as a
        slice does it. All prompts are computed."""
        return self.steps([names] * (steps + 1))

    def steps(self, batches: Sequence[Sequence[str]]) -> list[float]:
        """The same of steps that differ: one time less than there are batches."""
        self._begin()
        self._submit(batches[0])
        times: list[float] = []
        begin_s = time.perf_counter()
        for done, names in enumerate(batches[1:], 1):
            self._submit(names)
            self._until_done(done)
            end_s = time.perf_counter()
            times.append(end_s - begin_s)
            begin_s = end_s
        self._until_done(len(batches))
        return times

    def prefill(self, name: str, step_tokens: int) -> float:
        """Seconds of a prompt in steps of so many tokens, to its first token."""
        self._begin()
        talk, prompt = self._talks[name], self._talks[name].known
        begin_s = time.perf_counter()
        for done, start in enumerate(range(0, prompt, step_tokens), 1):
            talk.known = min(prompt, start + step_tokens)
            had = len(talk.blocks)
            self._take_blocks(talk)
            part = SeqStep(
                name, start, talk.known - start, tuple(talk.blocks[had:]), start == 0,
                emits=talk.known == prompt,
            )  # fmt: skip
            self._steps += 1
            self.executor.submit(RunStep(Step(self._steps, talk.model, (part,))))
            self._until_done(done)
        talk.known, talk.started = prompt + 1, True
        return time.perf_counter() - begin_s

    def blocks(self, name: str) -> tuple[int, ...]:
        """Where a request's blocks are in the arena."""
        return tuple(self._talks[name].blocks)

    def launch(self, names: Sequence[str]) -> None:
        """Submit one step; `finish` waits for it."""
        self._begin()
        self._submit(names)

    def finish(self) -> list[int]:
        """Return the tokens that the step has sampled."""
        self._until_done(1)
        return [token for delta in self._deltas for token in delta.tokens]

    def _report(self, event: SliceEvent | None, deltas: Sequence[Delta]) -> None:
        self._deltas += deltas
        if event is not None:
            self._events.append(event)

    def _begin(self) -> None:
        self._events.clear()
        self._deltas.clear()

    def _submit(self, names: Sequence[str]) -> None:
        parts = tuple(self._part(name) for name in names)
        self._steps += 1
        model = self._talks[names[0]].model
        if self._cache is not None:
            self._cache.begin_step(model, time.monotonic(), 0)
        self.executor.submit(RunStep(Step(self._steps, model, parts)))
        for name in names:
            self._talks[name].known += 1

    def _until_done(self, count: int) -> None:
        while sum(isinstance(event, StepDone) for event in self._events) < count:
            self.executor.poll()
            for event in self._events:
                if isinstance(event, StepFailed):
                    raise RuntimeError(f"a step failed: {event.reason}")
            if self._pause_s:
                time.sleep(self._pause_s)
        if errors := [delta.error for delta in self._deltas if delta.error]:
            raise RuntimeError(f"a step failed: {errors[0]}")

    def _part(self, name: str) -> SeqStep:
        talk = self._talks[name]
        had = len(talk.blocks)
        self._take_blocks(talk)
        start = talk.known - 1 if talk.started else 0
        fresh, talk.started = not talk.started, True
        new = tuple(talk.blocks[had:])
        return SeqStep(name, start, talk.known - start, new, fresh, emits=True)

    def _take_blocks(self, talk: _Talk) -> None:
        while len(talk.blocks) * BLOCK_TOKENS < talk.known:
            talk.blocks.append(self._next_block)
            self._next_block += self._kv[talk.model].block_bytes
        if self._next_block > self.arena.numel():
            raise ValueError(f"{self.arena.numel()} bytes of KV are too few")

    def end(self) -> None:
        """All requests are over; their KV memory is free."""
        for name in self._talks:
            self.executor.submit(Drop(name))
        self._talks.clear()
        self._next_block = 0


def decode_batch(kv: KvLayout, rows: int, context: int, device: torch.device) -> ForwardBatch:
    """One new token of each of `rows` sequences of `context` tokens, that included."""
    blocks = -(-context // BLOCK_TOKENS)
    table = torch.arange(rows * blocks).view(rows, blocks) * kv.block_bytes
    last = table[:, -1] * BLOCK_TOKENS + (context - 1) % BLOCK_TOKENS
    parts = {
        "ids": torch.arange(rows, dtype=torch.int32),
        "positions": torch.full((rows,), context - 1, dtype=torch.int32),
        "q_start": torch.arange(rows + 1, dtype=torch.int32),
        "context_len": torch.full((rows,), context, dtype=torch.int32),
        "block_table": table, "slots": last, "logit_rows": torch.arange(rows),
    }  # fmt: skip
    moved = {name: tensor.to(device) for name, tensor in parts.items()}
    return ForwardBatch(**moved, longest=context)


def attention_layer(config: ModelConfig, kv: KvLayout, index: int, device: torch.device) -> Layer:
    """As far as `Ops.attend` looks at one."""
    nothing = torch.empty(0)
    ones = torch.ones(config.head_dim, device=device)
    weights = LayerWeights(
        nothing, nothing, None, (ones, ones) if config.qk_norm else None, nothing, None, nothing,
        Mlp(nothing, None, nothing, None), config.windows[index],
    )  # fmt: skip
    scale = config.head_dim**-0.5
    shape = LayerShape(kv, config.hidden, config.heads, config.norm_eps, scale)
    return Layer(index, weights, shape)
