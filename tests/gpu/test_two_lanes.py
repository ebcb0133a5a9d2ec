"""Two lanes on a real GPU: equal bits with and without a stream beside, and what each takes.

The near model's weights are in HBM, the far model's are read in host memory. Run with `-s` to see
the ratios. They are printed and hardly asserted: `benchmarks/stream_beside.py` measures a server.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_case import COMMON, Lane, LateModel, no_sampler, shared_folder
from tiny import make_model

from c2cserve.core.events import StepFailed
from c2cserve.core.request import Sampling
from c2cserve.core.step import Lane as LaneName
from c2cserve.engine.gpu import lanes as gpu_lanes
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.engine.models.config import parse_config
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.models.rope import RopeTables
from c2cserve.engine.weights import Weights
from c2cserve.memory.segment import Segment
from c2cserve.policy.weights.hbm_residency import Residency

pytestmark = pytest.mark.gpu

KV_BYTES = 1 << 30
LIKELY = Sampling(seed=0, temperature=0.0, logprobs=0)
"""Greedy, with the log-probability of each token: its bits are compared."""
PROMPT = torch.randint(3, 1000, (20,), generator=torch.Generator().manual_seed(9)).tolist()
NEAR_TOKENS, FAR_TOKENS = 200, 12
SLEEP_CYCLES = 200_000_000
"""About 100 ms of a GPU."""
SHAPES: dict[str, dict[str, Any]] = {
    "near": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12},
    "far": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8},
}

ROTATED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "head_dim": 128,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@dataclass(frozen=True)
class Models:
    decoders: dict[str, Decoder]
    far: Segment
    """The far model's, registered with CUDA."""


class _NearWeights(Weights):
    """Matrices in HBM."""

    def tensor(self, name: str) -> torch.Tensor:
        # By way of pageable memory: a segment is registered in pieces, and CUDA refuses a copy that
        # crosses a border between two.
        moved = super().tensor(name).clone().cuda()
        torch.cuda.synchronize()
        return moved


class TwoLanes(Lane):
    def __init__(self, gpu: GpuParts) -> None:
        assert gpu.streaming is not None
        super().__init__(
            gpu.ops, arena=gpu.arena, to_device=gpu.to_device, streaming=gpu.streaming.parts,
            moved=gpu.moved, renew=gpu.renew,
        )  # fmt: skip
        gpu.fence.reading = self.executor.lanes_in_flight
        self.ends_s: dict[str, list[float]] = {}
        """When the steps of a request have ended."""
        self._flying: dict[int, str] = {}
        self._left: dict[str, int] = {}
        """Steps of a request that are still to be launched."""
        self._issued: dict[str, int] = {}

    def begin(self, name: str, model: str, tokens: int) -> None:
        self.add(name, model, PROMPT, tokens, LIKELY)
        self.ends_s[name] = []
        self._left[name] = tokens

    def run(self, lanes: dict[str, LaneName], ahead: int = 1) -> None:
        """Decode these requests to their ends, each in its lane, with `ahead` steps in flight."""
        for name in lanes:
            for _ in range(ahead):
                self._next(name, lanes[name])
        limit_s = time.monotonic() + 60
        while self._flying:
            assert time.monotonic() < limit_s
            for done in self.take_done():
                name = self._flying.pop(done.step_id)
                self.ends_s[name].append(time.perf_counter())
                self._next(name, lanes[name])

    def _next(self, name: str, lane: LaneName) -> None:
        if self._left[name]:
            self._left[name] -= 1
            issued = self._issued.setdefault(name, 0)
            part = (name, issued, 1 if issued else len(PROMPT))
            self._issued[name] += part[2]
            self._flying[self.launch(part, lane=lane)] = name

    def answer(self, name: str) -> list[tuple[int, float]]:
        """Tokens and their log-probabilities."""
        return [(one.token, one.logprob) for delta in self.of(name) for one in delta.logprobs]

    def steps_s(
        self, name: str, since_s: float = 0.0, until_s: float = float("inf")
    ) -> list[float]:
        """The times of its decode steps within this, in order of size."""
        ends = [end_s for end_s in self.ends_s[name] if since_s <= end_s <= until_s]
        return sorted(end_s - before_s for before_s, end_s in pairwise(ends))


def _show(line: str) -> None:
    print(line)  # noqa: T201


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, KV_BYTES, no_sampler, profile="assumed", lanes=2)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.fixture(scope="module")
def models(gpu: GpuParts) -> Iterator[Models]:
    segments = PinnedSegments()
    with shared_folder() as folder:
        late: dict[str, LateModel] = {}
        for name, shape in SHAPES.items():
            (folder / name).mkdir()
            make_model(
                folder / name, "Llama", {**COMMON, "head_dim": 128, **shape}, 1, torch.bfloat16,
                spread=0.05,
            )  # fmt: skip
            late[name] = LateModel(
                folder / name, 1024, device=gpu.device, open_=segments.open
            ).load_all()  # fmt: skip
            gpu.warm(late[name].config)
        near = late["near"]
        weights = _NearWeights(segments.open(near.path))
        decoders = {
            "near": Decoder(near.config, weights, 1024, gpu.device), "far": late["far"].decoder,
        }  # fmt: skip
        yield Models(decoders, segments.open(late["far"].path))
        gpu.finish()
        segments.close_all()


def _lanes_of(gpu: GpuParts, models: Models) -> TwoLanes:
    lanes = TwoLanes(gpu)
    for name, decoder in models.decoders.items():
        lanes.attach(name, decoder)
    return lanes


@pytest.fixture
def slice_(gpu: GpuParts, models: Models) -> TwoLanes:
    return _lanes_of(gpu, models)


def test_bits_are_equal_in_either_lane_alone_and_beside(gpu: GpuParts, slice_: TwoLanes) -> None:
    """Also while graphs are captured: the first runs of each size capture."""
    answers: dict[str, list[list[tuple[int, float]]]] = {"near": [], "far": []}
    tokens = {"near": NEAR_TOKENS, "far": FAR_TOKENS}
    runs: list[dict[str, LaneName]] = [
        {"near": "resident"}, {"far": "resident"}, {"near": "streaming"}, {"far": "streaming"},
        {"near": "resident", "far": "streaming"}, {"near": "streaming", "far": "resident"},
    ]  # fmt: skip
    for i, run in enumerate(runs):
        lanes: dict[str, LaneName] = {}
        for model, lane in run.items():
            slice_.begin(f"{model}{i}", model, tokens[model])
            lanes[f"{model}{i}"] = lane
        slice_.run(lanes)
        for model in run:
            answers[model].append(slice_.answer(f"{model}{i}"))
    for model, found in answers.items():
        assert len(found) == 4
        assert all(len(one) == tokens[model] for one in found)
        assert all(one == found[0] for one in found), model
    assert [graphs.failures for graphs in gpu.graphs] == [0, 0]
    assert all(graphs.replays > NEAR_TOKENS for graphs in gpu.graphs), "these were graphs"


@pytest.mark.parametrize("priorities", [(-1, 0), (0, 0)], ids=["resident first", "equal"])
def test_a_stream_does_not_hold_up_resident_steps(
    gpu: GpuParts, models: Models, monkeypatch: pytest.MonkeyPatch, priorities: tuple[int, int]
) -> None:
    """With two steps of each in flight, by priorities of the lanes' streams."""
    torch.cuda.synchronize()
    monkeypatch.setattr(gpu_lanes, "_PRIORITIES", {2: priorities})
    own = open_gpu(0, KV_BYTES, no_sampler, profile="assumed", lanes=2)
    try:
        slice_ = _lanes_of(own, models)
        homes: dict[str, LaneName] = {"near": "resident", "far": "streaming"}
        tokens = {"near": 4 * NEAR_TOKENS, "far": 4 * FAR_TOKENS}
        for model, lane in homes.items():
            for phase in ("warm", "alone"):
                slice_.begin(f"{model} {phase}", model, tokens[model])
                slice_.run({f"{model} {phase}": lane}, ahead=2)
        for model in homes:
            slice_.begin(model, model, tokens[model])
        slice_.run(homes, ahead=2)
    finally:
        own.finish()
        torch.cuda.set_stream(gpu.stream)
    begin_s = max(slice_.ends_s[name][0] for name in homes)
    end_s = min(slice_.ends_s[name][-1] for name in homes)
    found: dict[str, list[float]] = {}
    slower: dict[str, float] = {}
    for model in homes:
        alone, beside = slice_.steps_s(f"{model} alone"), slice_.steps_s(model, begin_s, end_s)
        assert len(beside) > 4, "they hardly overlapped"
        found[model] = beside
        slower[model] = (sum(beside) / len(beside)) / (sum(alone) / len(alone))
        for share in (0.5, 0.99):
            at, at_beside = (one[int(share * (len(one) - 1))] for one in (alone, beside))
            _show(f"{model} p{100 * share:.0f}: {1e3 * at:.2f} ms alone,"
                  f" {1e3 * at_beside:.2f} beside, {at_beside / at:.2f}x")  # fmt: skip
    assert len(found["near"]) > 2 * len(found["far"]), "resident steps waited for the stream"
    assert slower["far"] < 3, "resident steps starve the stream"


def test_weights_that_go_while_they_are_read_are_read_to_the_end(
    gpu: GpuParts, models: Models
) -> None:
    """A stream's cached weights are dropped for KV of the other lane, which overwrites them."""
    torch.cuda.synchronize()
    own = open_gpu(
        0, KV_BYTES, no_sampler, profile="assumed", lanes=2, cache_policy=Residency(KV_BYTES)
    )
    try:
        assert own.cache is not None
        data = models.far.data
        own.cache.add("far", data.ctypes.data, data.nbytes)
        answers = [_answer(own, models, disturbed=disturbed) for disturbed in (False, True)]
        assert answers[0] == answers[1]
        assert own.fence.waits > 0
    finally:
        own.finish()
        torch.cuda.set_stream(gpu.stream)


def _answer(gpu: GpuParts, models: Models, *, disturbed: bool) -> list[tuple[int, float]]:
    """The far model's answer in the streaming lane, out of the weight cache. If `disturbed`, the
    cache is overwritten while steps read it."""
    assert gpu.cache is not None
    lanes = TwoLanes(gpu)
    lanes.attach("far", models.decoders["far"])
    lanes.begin("far", "far", FAR_TOKENS)
    kv_end = KV_BYTES // 8
    part = ("far", 0, len(PROMPT))
    for i in range(FAR_TOKENS):
        gpu.cache.begin_step("far", float(i), kv_end)
        dropped = disturbed and i % 3 == 2
        if dropped:  # the step reads its weights after they were dropped
            _busy(gpu)
        lanes.launch(part, lane="streaming")
        if dropped:
            gpu.cache.make_room(KV_BYTES)
            gpu.arena[kv_end:].fill_(255)  # on the resident lane's stream
        while not lanes.take_done():
            pass
        gpu.stream.synchronize()  # what was written there has ended before weights come back
        part = ("far", len(PROMPT) + i, 1)
    return lanes.answer("far")


def _busy(gpu: GpuParts) -> None:
    """Have the streaming lane's next work begin after a while."""
    assert gpu.streaming is not None
    with gpu.streaming.current():
        torch.cuda._sleep(SLEEP_CYCLES)


def test_what_a_stream_still_reads_is_not_reused_by_the_other_lane(gpu: GpuParts) -> None:
    """Rotary tables were made in the resident lane. They grow while a stream's step reads them, and
    neither waits for the other."""
    assert gpu.streaming is not None
    grown = RopeTables(parse_config(ROTATED), 16384, gpu.device).upto(5000)
    torch.full_like(grown[0], 7.0)  # whatever is loaded at first use
    tables = RopeTables(parse_config(ROTATED), 16384, gpu.device)
    before = tables.upto(1)[0].cpu()
    gpu.streaming.parts.attached()
    with gpu.streaming.current():
        torch.cuda._sleep(SLEEP_CYCLES)
        read = tables.upto(1)[0].clone()
        tables.upto(5000)
        end = torch.cuda.Event()
        end.record()
    others = [torch.full_like(read, 7.0) for _ in range(8)]
    assert not end.query(), "growing tables waits for the stream"
    gpu.finish()
    assert torch.equal(read.cpu(), before)
    assert torch.equal(tables.upto(1)[0][: len(before)].cpu(), before)
    assert all(bool((one == 7.0).all()) for one in others)


def test_a_failed_step_beside_a_stream_changes_none_of_its_tokens(
    gpu: GpuParts, slice_: TwoLanes
) -> None:
    """Both lanes are built anew while a stream's step is under way."""
    answers: list[list[tuple[int, float]]] = []
    for name in ("sound", "disturbed"):
        slice_.begin(name, "far", FAR_TOKENS)
        part = (name, 0, len(PROMPT))
        for i in range(FAR_TOKENS):
            disturbed = name == "disturbed" and i % 4 == 3
            if disturbed:
                _busy(gpu)
            slice_.launch(part, lane="streaming")
            if disturbed:
                _fail_resident_step(slice_, f"failing{i}")
            while not slice_.take_done():
                pass
            part = (name, len(PROMPT) + i, 1)
        answers.append(slice_.answer(name))
    assert len(answers[0]) == FAR_TOKENS
    assert answers[0] == answers[1]


def _fail_resident_step(slice_: TwoLanes, name: str) -> None:
    slice_.add(name, "near", PROMPT, 4, LIKELY)
    slice_.executor.detach("near")
    failing = slice_.launch((name, 0, len(PROMPT)))
    failed = slice_.events.pop()  # the stream's step has ended before it
    assert isinstance(failed, StepFailed)
    assert failed.step_id == failing
    slice_.drop(name)
