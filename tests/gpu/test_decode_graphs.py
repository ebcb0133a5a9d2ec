"""Steps as graphs: the same bits as kernels launched one by one, for any model of an architecture,
wherever its weights are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_case import VOCAB, make, no_sampler, ours_at, shared_folder
from gemm_case import HOMES
from tiny import Ours
from torch import Tensor

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.kernels.gpu.elementwise import silu_mul
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.policy.weights.hbm_residency import Residency

pytestmark = pytest.mark.gpu

PROMPT = torch.randint(3, VOCAB, (300,), generator=torch.Generator().manual_seed(5)).tolist()
STEPS = 6


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        policy = Residency(256 << 20)
        yield open_gpu(0, 256 << 20, no_sampler, profile="assumed", cache_policy=policy)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


@pytest.fixture
def segments(gpu: GpuParts) -> Iterator[PinnedSegments]:
    held = PinnedSegments()
    yield held
    torch.cuda.synchronize()
    held.close_all()


@pytest.fixture(autouse=True)
def _new_graphs(gpu: GpuParts) -> None:
    """None of another test's, and what captures it earned."""
    gpu.ops.capture_decoding(gpu.linear.launched, gpu.cache)


def talk(ours: Ours, gpu: GpuParts, seqs: tuple[int, ...], *, graphs: bool) -> list[Tensor]:
    """Logits of some steps of one new token each, after prompts of different lengths."""
    captured, decode = gpu.ops.graphs, []
    gpu.ops.graphs = None
    try:
        for seq in seqs:
            ours.step([(seq, PROMPT[: 40 + 37 * (seq % 7)], 0)])
        if graphs:
            gpu.ops.graphs = captured
        for step in range(STEPS):
            at = [40 + 37 * (seq % 7) + step for seq in seqs]
            parts = [(s, [PROMPT[-1 - step - s]], a) for s, a in zip(seqs, at, strict=True)]
            decode.append(torch.cat(ours.step(parts)).cpu())
    finally:
        gpu.ops.graphs = captured
    return decode


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "case",
    ["llama", "llama-1000", "llama-bias-80", "mistral-window", "qwen2", "qwen3-tied", "qwen3-moe"],
)
def test_the_same_bits(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, case: str, home: str
) -> None:
    make(folder, case)
    ours = ours_at(folder, home, gpu, segments)
    gpu.warm(ours.config)
    assert gpu.ops.graphs is not None
    add(gpu, ours, "m")
    gpu.cache.begin_step("m", 0.0, None)
    for count in (1, 3, 5):
        launched = talk(ours, gpu, tuple(range(10, 10 + count)), graphs=False)
        before = gpu.ops.graphs.replays
        replayed = talk(ours, gpu, tuple(range(20, 20 + count)), graphs=True)
        assert gpu.ops.graphs.replays - before >= STEPS - 1
        # Sequences begin alike: 20 + i has the prompt's length of another, so compare themselves.
        again = talk(ours, gpu, tuple(range(20, 20 + count)), graphs=False)
        for one, other in zip(replayed, again, strict=True):
            assert torch.equal(one, other)
        assert not any(one.isnan().any() for one in launched)
    gpu.cache.forget("m")
    if home == "host":
        gpu.finish()
        segments.close(folder / "segment")


class Apart:
    """GEMMs of a slice, and activations by kernels of their own."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, w, bias)

    def gated(self, x: Tensor, w: WeightHandle, bias: Tensor | None = None) -> Tensor:
        return silu_mul(self._linear(x, w, bias))

    def experts(self, x: Tensor, w: WeightHandle, offsets: Tensor, top_k: int) -> Tensor:
        return self._linear.experts(x, w, offsets, top_k)


@pytest.mark.parametrize("case", ["llama", "llama-1000", "qwen3-moe"])
def test_the_bits_of_activations_apart(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, case: str
) -> None:
    """Of graphs too, at every number of rows that decodes by them."""
    make(folder, case)
    ours = ours_at(folder, "hbm", gpu, segments, blocks=1200)
    gpu.warm(ours.config)
    add(gpu, ours, "m")
    assert gpu.cache is not None
    gpu.cache.begin_step("m", 0.0, None)
    fused = gpu.ops._multiply
    for count in (1, 16, 17, 64):
        seqs = tuple(range(count))
        found = [talk(ours, gpu, seqs, graphs=graphs) for graphs in (False, True)]
        gpu.ops._multiply = Apart(gpu.linear)
        try:
            want = talk(ours, gpu, seqs, graphs=False)
        finally:
            gpu.ops._multiply = fused
        for said in found:
            assert all(torch.equal(a, b) for a, b in zip(said, want, strict=True))
    gpu.cache.forget("m")


def test_a_long_context_after_short_ones(
    gpu: GpuParts, segments: PinnedSegments, folder: Path
) -> None:
    """Graphs of short contexts stay, and there is memory to capture the next ones in."""
    make(folder, "llama-long")
    ours = ours_at(folder, "hbm", gpu, segments, blocks=1200, longest=16384)
    gpu.warm(ours.config)
    add(gpu, ours, "m")
    assert gpu.cache is not None
    gpu.cache.begin_step("m", 0.0, None)
    graphs = gpu.ops.graphs
    assert graphs is not None
    tokens = torch.randint(3, VOCAB, (8192,), generator=torch.Generator().manual_seed(1)).tolist()
    for seq, length in enumerate((512, 8192, 512, 2000)):
        ours.step([(seq, tokens[:length], 0)])
        said: list[list[Tensor]] = []
        for captured in (graphs, None, graphs):
            gpu.ops.graphs = captured
            steps = [ours.step([(seq, [tokens[step]], length + step)]) for step in range(STEPS)]
            said.append([logits.cpu() for step in steps for logits in step])
        for other in said[1:]:
            assert all(torch.equal(a, b) for a, b in zip(said[0], other, strict=True))
    assert (graphs.captures, graphs.failures, graphs.dropped) == (3, 0, 0)
    gpu.cache.forget("m")


def test_a_capture_that_fails_breaks_nothing(
    gpu: GpuParts, segments: PinnedSegments, folder: Path
) -> None:
    """Its size is launched kernel by kernel; others are captured as before."""
    make(folder, "llama")
    ours = ours_at(folder, "hbm", gpu, segments)
    add(gpu, ours, "m")
    assert gpu.cache is not None
    gpu.cache.begin_step("m", 0.0, None)
    graphs = gpu.ops.graphs
    assert graphs is not None
    expected = {seqs: talk(ours, gpu, seqs, graphs=False) for seqs in ((1,), (2, 3))}
    launch = graphs._launch

    def fails(*given: Any) -> Tensor:
        done = launch(*given)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # not allowed: the capture is lost
        return done

    graphs._launch = fails
    said = talk(ours, gpu, (1,), graphs=True)
    assert (graphs.failures, graphs.captures, graphs.replays) == (1, 0, 0)
    graphs._launch = launch
    again = talk(ours, gpu, (2, 3), graphs=True)
    assert (graphs.failures, graphs.captures) == (1, 1)
    for found, seqs in ((said, (1,)), (again, (2, 3))):
        assert all(torch.equal(a, b) for a, b in zip(found, expected[seqs], strict=True))
    gpu.cache.forget("m")


@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("count", [65, 100, 130])
def test_more_sequences_than_our_own_gemms_take(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, monkeypatch: pytest.MonkeyPatch,
    case: str, count: int,
) -> None:  # fmt: skip
    """The same bits as launched kernel by kernel, with as many rows; and near those of steps that
    are not padded, whose GEMMs may be others."""
    make(folder, case)
    ours = ours_at(folder, "hbm", gpu, segments, blocks=2600)
    gpu.warm(ours.config)
    add(gpu, ours, "m")
    assert gpu.cache is not None
    gpu.cache.begin_step("m", 0.0, None)
    seqs = tuple(range(count))
    graphs = gpu.ops.graphs
    assert graphs is not None
    replayed = talk(ours, gpu, seqs, graphs=True)
    assert (graphs.captures, graphs.replays) == (1, STEPS - 1)
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_replayed", lambda *_: False)
        launched = talk(ours, gpu, seqs, graphs=True)
    assert graphs.replays == STEPS - 1
    assert all(torch.equal(a, b) for a, b in zip(replayed, launched, strict=True))
    plain = talk(ours, gpu, seqs, graphs=False)
    for one, other in zip(replayed, plain, strict=True):
        assert (one.float() - other.float()).abs().max() < 0.05 * other.float().abs().max()
    gpu.cache.forget("m")


def test_models_of_an_architecture_share_graphs(
    gpu: GpuParts, segments: PinnedSegments, folder: Path
) -> None:
    """A switch captures nothing, and says what the model alone says."""
    models: list[Ours] = []
    for number in range(3):
        place = folder / str(number)
        place.mkdir()
        make(place, "qwen3-tied")
        models.append(ours_at(place, "hbm", gpu, segments))
        for layer in range(models[-1].config.layers):
            weight = models[-1].decoder._weights.tensor(f"layers.{layer}.qkv")
            assert weight.device.type == "cuda"
    # The same weights in each: what differs is made different here, where they are.
    graphs = gpu.ops.graphs
    assert graphs is not None
    arena = models[0].arena
    for model in models:
        model.arena = arena
    expected = [talk(model, gpu, (1, 2), graphs=False) for model in models]
    captures = graphs.captures
    found: list[list[Tensor]] = [[] for _ in models]
    for _ in range(2):
        for number, model in enumerate(models):
            found[number] = talk(model, gpu, (1, 2), graphs=True)
    assert graphs.captures == captures + 1
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_model_warms_up_and_its_answers_stay(
    gpu: GpuParts, segments: PinnedSegments, folder: Path
) -> None:
    """Streamed, half of it in HBM, all of it, and again after KV took the room: bit for bit."""
    make(folder, "llama")
    ours = ours_at(folder, "host", gpu, segments)
    add(gpu, ours, "m")
    assert gpu.cache is not None
    end = gpu.arena.numel()
    said: list[list[Tensor]] = []
    shares: list[float] = []
    for kv_end in (None, end - 3_000_000, 0, 0, None):
        gpu.cache.begin_step("m", 0.0, kv_end)
        before = gpu.cache.counts.hit_bytes, gpu.cache.counts.streamed_bytes
        said.append(talk(ours, gpu, (1, 2, 3), graphs=True))
        hit = gpu.cache.counts.hit_bytes - before[0]
        streamed = gpu.cache.counts.streamed_bytes - before[1]
        shares.append(hit / (hit + streamed))
    for other in said[1:]:
        assert all(torch.equal(a, b) for a, b in zip(said[0], other, strict=True))
    assert shares[0] == shares[4] == 0.0
    assert 0.0 < shares[1] < 0.9
    assert shares[3] == 1.0
    assert gpu.cache.bytes == 0
    gpu.cache.forget("m")
    gpu.finish()
    segments.close(folder / "segment")


def add(gpu: GpuParts, ours: Ours, model: str) -> None:
    assert gpu.cache is not None
    tensors = [ours.decoder._weights.tensor(name) for name in ours.segment.tensors]
    if tensors[0].device.type == "cpu":
        data = ours.decoder._weights._segment.data
        gpu.cache.add(model, data.ctypes.data, data.nbytes)
    else:
        gpu.cache.add(model, 0, 1 << 62)
