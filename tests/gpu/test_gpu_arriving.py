"""A prompt whose weights are still on their way to HBM, on a real GPU: each layer runs when it has
arrived, no bit depends on it, and no other model's step waits.

`pytest -m gpu -s tests/gpu/test_gpu_arriving.py` prints how long first tokens take.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from engine_case import CASES, Lane, LateModel, no_sampler, shared_folder
from gpu_engine_case import PROMPT
from swapping_case import LARGE, make_seeded

from c2cserve.core.events import StepDone, StepParked
from c2cserve.core.request import Sampling
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.engine.gpu.tables import matrices_by_layer
from c2cserve.kernels.gpu.gemm.weight import WeightHandle

pytestmark = pytest.mark.gpu

MIB = 1 << 20
KV_END = 512 * MIB
ARENA = 3500 * MIB
LAYERS = 6
LIKELY = Sampling(seed=0, temperature=0.0, logprobs=0)
"""Greedy, with the log-probability of each token: its bits are compared."""
LIMIT_S = 60.0


class Arriving(Lane):
    def __init__(self, gpu: GpuParts) -> None:
        super().__init__(
            gpu.ops, arena=gpu.arena, to_device=gpu.to_device, renew=gpu.renew,
            moved=gpu.moved, arrived=gpu.arrived,
        )  # fmt: skip
        gpu.fence.reading = self.executor.lanes_in_flight

    def answer(self, name: str) -> list[tuple[int, float]]:
        """Tokens and their log-probabilities."""
        return [(one.token, one.logprob) for delta in self.of(name) for one in delta.logprobs]


@dataclass
class Case:
    """A large model that is loaded while it computes, and a small one that is there."""

    gpu: GpuParts
    models: dict[str, LateModel]
    lane: Arriving = field(init=False)

    def __post_init__(self) -> None:
        self.lane = Arriving(self.gpu)
        for name, model in self.models.items():
            self.lane.attach(name, model.decoder)
        self.load("small")

    def fetch(self, name: str) -> None:
        assert self.gpu.loads is not None
        self.gpu.loads.fetch(name, lambda: self._matrices(name), KV_END)

    def _matrices(self, name: str) -> list[list[WeightHandle]]:
        prepared = self.models[name].decoder.prepared(self.gpu.ops)
        assert prepared is not None
        return matrices_by_layer(*prepared, self.gpu.device)

    def load(self, name: str) -> float:
        """Load a model, and return the seconds that it takes."""
        assert self.gpu.loads is not None
        self.fetch(name)
        end_s = time.monotonic() + LIMIT_S
        while not (outcomes := self.gpu.loads.poll()):
            assert time.monotonic() < end_s
        assert not outcomes[0].refused
        return outcomes[0].took_s

    def release(self, name: str) -> None:
        assert self.gpu.loads is not None
        self.gpu.loads.release(name)
        self.gpu.finish()

    @property
    def streamed_bytes(self) -> int:
        return self.gpu.moved().streamed


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    before = torch.cuda.current_stream()
    with shared_folder() as folder, torch.no_grad():
        gpu = open_gpu(0, ARENA, no_sampler, profile="assumed", swaps_weights=True)
        segments = PinnedSegments()
        shapes = {"large": {**LARGE, "num_hidden_layers": LAYERS}, "small": CASES["llama"][1]}
        models = {
            name: _opened(folder / name, seed, fields, gpu, segments)
            for seed, (name, fields) in enumerate(shapes.items())
        }
        for model in models.values():
            gpu.warm(model.config)
        yield Case(gpu, models)
        gpu.finish()
        segments.close_all()
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


def _opened(
    folder: Path, seed: int, fields: dict[str, int], gpu: GpuParts, segments: PinnedSegments
) -> LateModel:
    checkpoint = make_seeded(folder, seed, fields)
    model = LateModel(checkpoint, 1024, device=gpu.device, open_=segments.open)
    return model.load_all()


def show(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")


def begin(case: Case, name: str, tokens: int) -> None:
    """Launch a prompt of the model that has just begun to load."""
    case.lane.add(name, "large", PROMPT[:tokens], 1, LIKELY)
    assert isinstance(case.lane.step((name, 0, tokens)), StepParked)


def end(case: Case) -> set[int | None]:
    """Poll until the step is over. Return how many layers were seen to have arrived."""
    seen: set[int | None] = set()
    end_s = time.monotonic() + LIMIT_S
    while not isinstance(case.lane.events[-1], StepDone):
        case.lane.executor.poll()
        seen.add(case.gpu.arrived("large"))
        assert time.monotonic() < end_s, "the step is stuck"
    return seen


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_a_first_token_is_the_same_and_comes_with_the_last_layer(case: Case, tokens: int) -> None:
    """Prompts by both kinds of GEMMs. The second of two times is shown: the first may compile."""
    load_s = case.load("large")
    case.lane.add(f"there{tokens}", "large", PROMPT[:tokens], 1, LIKELY)
    case.lane.finish(f"there{tokens}")
    want = case.lane.answer(f"there{tokens}")
    assert case.gpu.loads is not None
    for turn in range(2):
        case.release("large")
        copied, streamed = case.gpu.loads.counts.copied_bytes, case.streamed_bytes
        begun_s = time.monotonic()
        case.fetch("large")
        begin(case, f"{tokens}.{turn}", tokens)
        seen = end(case)
        first_s = time.monotonic() - begun_s
        [outcome] = case.gpu.loads.poll()
        assert not outcome.refused
        assert case.lane.answer(f"{tokens}.{turn}") == want
        assert len(seen) > LAYERS // 2, f"layers arrived one by one: {seen}"
        assert case.streamed_bytes == streamed, "no weight came twice"
        matrices = sum(w.bytes for layer in case._matrices("large") for w in layer)
        assert case.gpu.loads.counts.copied_bytes - copied == matrices
    show(
        f"prompt of {tokens}: first token {1e3 * first_s:.1f} ms after the load began, which took"
        f" {1e3 * outcome.took_s:.1f} ms ({1e3 * load_s:.1f} alone)"
    )
    assert first_s < 1.15 * outcome.took_s + 0.005
    case.release("large")


def test_others_decode_while_a_prompt_waits_for_its_layers(case: Case) -> None:
    def decode(name: str, count: int, start: int) -> list[float]:
        times: list[float] = []
        for position in range(start, start + count):
            begun_s = time.monotonic()
            case.lane.launch((name, position, 1))
            while not case.lane.take_done():
                pass
            times.append(time.monotonic() - begun_s)
        return times

    case.lane.add("alone", "small", PROMPT[:20], 200, LIKELY)
    case.lane.add("beside", "small", PROMPT[:20], 200, LIKELY)
    for name in ("alone", "beside"):
        case.lane.launch((name, 0, 20))
        while not case.lane.take_done():
            pass
    alone = sorted(decode("alone", 60, 20))
    case.fetch("large")
    case.lane.add("waits", "large", PROMPT, 1, LIKELY)
    parked = case.lane.launch(("waits", 0, len(PROMPT)))
    beside: list[float] = []
    while not any(isinstance(one, StepDone) and one.step_id == parked for one in case.lane.events):
        at = 20 + len(beside)
        begun_s = time.monotonic()
        step = case.lane.launch(("beside", at, 1))
        over = False
        while not over:
            over = any(done.step_id == step for done in case.lane.take_done())
        beside.append(time.monotonic() - begun_s)
    assert len(beside) > 5, "other models' steps ran before the load was over"
    want, got = case.lane.answer("alone"), case.lane.answer("beside")
    assert got[: len(want)] == want[: len(got)]
    beside.sort()
    show(
        f"a decode step {1e3 * alone[len(alone) // 2]:.2f} ms alone,"
        f" {1e3 * beside[len(beside) // 2]:.2f} beside a load and its prompt (longest"
        f" {1e3 * beside[-1]:.2f}, {len(beside)} steps)"
    )
    assert case.gpu.loads is not None
    case.gpu.loads.poll()
    case.release("large")


def test_a_load_that_kv_cancels_halfway_leaves_the_answer_as_it_is(case: Case) -> None:
    """The layers that have not arrived are read in host memory. Another load follows."""
    case.load("large")
    case.lane.add("whole", "large", PROMPT, 1, LIKELY)
    case.lane.finish("whole")
    case.release("large")
    loads, cache = case.gpu.loads, case.gpu.cache
    assert loads is not None
    assert cache is not None
    streamed = case.streamed_bytes
    case.fetch("large")
    begin(case, "cancelled", len(PROMPT))
    while case.gpu.arrived("large") == 0:
        case.lane.executor.poll()
    case.lane.executor.poll()
    loads.make_room(None)
    cache.make_room(None)
    end(case)
    assert case.lane.answer("cancelled") == case.lane.answer("whole")
    assert case.streamed_bytes > streamed
    assert {one.model for one in loads.poll() if one.refused} == {"large", "small"}
    case.load("small")
    case.load("large")
    case.lane.add("again", "large", PROMPT, 1, LIKELY)
    case.lane.finish("again")
    assert case.lane.answer("again") == case.lane.answer("whole")
    case.release("large")


def test_a_model_that_is_released_while_it_loads_ends_its_step(case: Case) -> None:
    for turn in range(4):
        case.fetch("large")
        begin(case, f"released{turn}", 40)
        time.sleep(0.002 * turn)
        case.lane.executor.poll()
        case.release("large")
        case.lane.executor.abandon("large")
        assert not any(case.lane.executor.lanes_in_flight("large"))
    case.load("large")
    case.lane.add("after", "large", PROMPT[:40], 1, LIKELY)
    case.lane.finish("after")
    assert case.lane.answer("after")
    case.release("large")
