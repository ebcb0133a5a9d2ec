"""A GPU slice with C2CServe's GEMMs: its logits and answers, what it counts, and alpha."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engine_case import make, no_sampler, ours_at, truth
from gpu_engine_case import OTHER, PROMPT, folder, segments
from swapping_case import LARGE, SwappingSlice, make_seeded
from torch import Tensor

from c2cserve.core.actions import SetAlpha
from c2cserve.core.events import ChunksProfiled, GemmsMeasured, SliceEvent
from c2cserve.core.request import Delta
from c2cserve.devices.partitions import split_sms
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu

__all__ = ["folder", "segments"]

pytestmark = pytest.mark.gpu

MIB = 1 << 20
CASES = ("llama", "llama-bias-80", "qwen3-tied", "qwen3-moe")
ALLOWED = {"qwen3-moe": 2.0}
HOMES = [
    "host",
    pytest.param(
        "peer", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour")
    ),
]


@pytest.fixture(scope="module")
def gpu() -> Iterator[GpuParts]:
    before = torch.cuda.current_stream()
    with torch.no_grad():
        yield open_gpu(0, 1 << 30, no_sampler, profile="assumed", hybrid_alpha=0.0)
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)


def rms(got: Tensor, want: Tensor) -> float:
    return float((got.cpu().double() - want.double()).square().mean().sqrt())


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("alpha", [0.0, 0.40625, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_logits(
    gpu: GpuParts, segments: PinnedSegments, folder: Path, case: str, alpha: float, home: str
) -> None:
    """A prompt at once, in chunks beside another one, and decoding, as near as our own GEMMs."""
    theirs, exact = truth(make(folder, case), PROMPT)
    unit = ALLOWED.get(case, 1.25) * rms(theirs, exact)
    assert gpu.hybrid is not None
    gpu.hybrid.first_alpha = alpha
    ours = ours_at(folder, home, gpu, segments)
    gpu.warm(ours.config)
    whole, beside = ours.step([(0, PROMPT, 0), (1, OTHER[:5], 0)])
    assert rms(whole, exact) < unit
    for begin, end in pairwise([0, 17, 200, 296]):
        part, beside = ours.step([(2, PROMPT[begin:end], begin), (1, [OTHER[5]], 5)])
        assert rms(part, exact[begin:end]) < 2 * unit
        assert not beside.isnan().any()
    for at in range(296, 300):
        (one,) = ours.step([(2, [PROMPT[at]], at)])
        assert rms(one, exact[at : at + 1]) < 2 * unit
    assert gpu.linear.launched["hybrid"] > 0
    assert gpu.ops.graphs is None
    gpu.finish()
    if home == "host":
        segments.close(folder / "segment")


def test_a_partition_of_sms_runs_them(segments: PinnedSegments, folder: Path) -> None:
    theirs, exact = truth(make(folder, "llama"), PROMPT)
    before = torch.cuda.current_stream()
    partition = split_sms(0, 16, 1)[0]
    try:
        with torch.no_grad():
            parts = open_gpu(
                0, 64 * MIB, no_sampler, partition=partition, profile="assumed", hybrid_alpha=0.5
            )
            ours = ours_at(folder, "host", parts, segments)
            (logits,) = ours.step([(0, PROMPT, 0)])
            assert rms(logits, exact) < 1.25 * rms(theirs, exact)
            assert 0.0 < parts.hbm_bytes_per_s() < 1e12, "an eighth of the GPU's"
            parts.finish()
    finally:
        torch.cuda.synchronize()
        torch.cuda.set_stream(before)
    segments.close(folder / "segment")


class Published(SwappingSlice):
    """A slice of the published system, and what its engine has reported."""

    def __init__(self, name: str) -> None:
        self.reported: list[SliceEvent] = []
        super().__init__(512 * MIB, policy=name, max_step_tokens=512)

    def _report(self, event: SliceEvent | None, deltas: Sequence[Delta]) -> None:
        super()._report(event, deltas)
        if event is not None:
            self.reported.append(event)

    def measured(self) -> list[GemmsMeasured]:
        return [one for one in self.reported if isinstance(one, GemmsMeasured)]


@pytest.mark.parametrize("name", ["c2cserve-published", "c2cserve-alpha-1"])
def test_a_slice_reports_what_its_steps_used(folder: Path, name: str) -> None:
    """Two layers of an 8B from host memory. The link is what its steps wait for."""
    with torch.no_grad():
        slice_ = Published(name)
        slice_.attach("m", make_seeded(folder / "m", 1, LARGE), keep=False)
        slice_.submit("r", "m", PROMPT, 24)
        slice_.finish("r")
        assert len(slice_.tokens("r")) == 24
        [table] = [one for one in slice_.reported if isinstance(one, ChunksProfiled)]
        assert [one.tokens for one in table.chunks] == [16, 32, 64, 128, 256, 512]
        found = slice_.measured()
        assert len(found) >= 24
        last = found[-8:]
        for one in last:
            assert 0.5 < one.link_utilization <= 1.0, one
            assert 0.0 < one.hbm_utilization < 0.5, one
        stats = slice_.stats
        passes = stats.weights_streamed_bytes / slice_.specs["m"].weight_bytes
        assert passes > 20, "every step reads all weights"
        assert stats.hybrid_hbm_bytes > 0
        assert stats.graph_steps == stats.weight_fetches == 0
        slice_.close()


def test_alpha_is_set_for_one_model(folder: Path) -> None:
    """At alpha 1, a prompt of 300 rows in one chunk reads W twice; at alpha 0, once."""
    with torch.no_grad():
        slice_ = Published("c2cserve-static")
        for number, name in enumerate("ab"):
            slice_.attach(name, make_seeded(folder / name, number, LARGE), keep=False)
        slice_.engine.submit(SetAlpha("b", 1.0))
        again: dict[str, int] = {}
        for name in "ab":
            hybrid = slice_.gpu.hybrid
            assert hybrid is not None
            before = hybrid.reread_bytes
            slice_.submit(name, name, PROMPT, 1)
            slice_.finish(name)
            again[name] = hybrid.reread_bytes - before
        assert again["a"] == 0
        assert again["b"] > 0.5 * slice_.specs["b"].weight_bytes
        assert slice_.stats.alpha_changes == 1
        slice_.close()
