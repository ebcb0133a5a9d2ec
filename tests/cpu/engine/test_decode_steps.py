"""Which steps run as graphs, and that they compute what launching kernel by kernel does: on fakes
of CUDA's graphs and a made-up layer stack."""

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from fake_graphs import FakeAllocator, install
from interpreted import DEVICE
from layer_stacks import HIDDEN, layer_stack, rope
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.engine.gpu import graph_cache, tables
from c2cserve.engine.gpu import graphs as graphs_module
from c2cserve.engine.gpu.graph_cache import bucket
from c2cserve.engine.gpu.graphs import DecodeGraphs
from c2cserve.engine.gpu.layers import GpuLayer
from c2cserve.engine.gpu.tables import Rope, matrices
from c2cserve.kernels.gpu.driver import MAP_BYTES
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.kernels.layer import TokenRows

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="tests/gpu has the like on real ones")

ARENA = torch.zeros(64, dtype=torch.uint8)
ROPE = rope(1, 16384)


class Launches:
    """`GpuOps._launch_layers` of a model that adds to each token where it is stored."""

    def __init__(self, allocator: FakeAllocator) -> None:
        self._allocator = allocator
        self.counts: Counter[str] = Counter()
        self.rows: list[int] = []
        """Of the launches that were not captured."""
        self.layers: list[Sequence[GpuLayer]] = []

    def __call__(
        self, hidden: Tensor, layers: Sequence[GpuLayer], rows: TokenRows, _: Rope, arena: Tensor
    ) -> Tensor:
        branch = torch.empty_like(hidden)

        def kernel() -> None:
            branch.copy_(rows.slots[:, None].expand_as(branch))

        self.counts["gemm"] += len(layers)
        self.layers.append(layers)
        if self._allocator.open is None:
            kernel()
            self.rows.append(len(hidden))
        else:
            assert len(hidden) in self.rows, "what loads on first use would load in a capture"
            self._allocator.open.launch(kernel)
        return branch


@dataclass
class Cache:
    """In place of `HbmCache`: all weights are in HBM, or none."""

    resident: bool = True
    changes: int = 0
    shift: int = 0
    wanted: bool = False
    counted: int = 0
    away: frozenset[int] = frozenset()
    """Addresses of weights that are not in HBM all the same."""

    def location(self, w: WeightHandle) -> WeightHandle:
        if not self.resident or w.pointer in self.away:
            return w
        return replace(w, home="hbm", pointer=w.pointer + self.shift)

    def wants(self, w: WeightHandle) -> bool:
        return self.wanted

    def count(self, hit_bytes: int, streamed_bytes: int, peer_bytes: int) -> None:
        self.counted += 1

    def move(self, **fields: bool | int | frozenset[int]) -> None:
        for name, value in fields.items():
            setattr(self, name, value)
        self.changes += 1


class Slice:
    def __init__(self, allocator: FakeAllocator, cache: Cache, *, by_places: bool = False) -> None:
        self.launch = Launches(allocator)
        self.graphs = DecodeGraphs(
            self.launch, self.launch.counts, cache, by_places=by_places
        )  # fmt: skip

    def step(
        self, layers: list[GpuLayer], seqs: int, *, context: int = 600, prompt: int = 0
    ) -> tuple[int, int]:
        """Run one and check its result; the graphs replayed and captured by it."""
        before = self.graphs.replays, self.graphs.captures
        tokens, lengths = seqs + prompt, seqs + (prompt > 0)
        starts = [*range(seqs + 1), tokens] if prompt else range(seqs + 1)
        rows = TokenRows(
            positions=torch.zeros(tokens, dtype=torch.int32),
            q_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.full((lengths,), context, dtype=torch.int32),
            block_table=torch.zeros(lengths, -(-context // 16), dtype=torch.int64),
            slots=torch.randint(100, (tokens,)),
        )
        hidden = torch.randn(tokens, HIDDEN).bfloat16()
        want = hidden + rows.slots[:, None].bfloat16()
        self.graphs.run(hidden, layers, rows, ROPE, ARENA)
        assert torch.equal(hidden, want)
        return self.graphs.replays - before[0], self.graphs.captures - before[1]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    def blank(w: WeightHandle) -> bytes:
        return bytes(MAP_BYTES)

    monkeypatch.setattr(tables, "weight_map", blank)
    monkeypatch.setattr(tables, "gated_map", blank)
    monkeypatch.setattr(tables, "for_libraries", lambda w: w)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    return install(monkeypatch)


def test_graphs_below_and_above_64_sequences(allocator: FakeAllocator) -> None:
    cache = Cache()
    one, layers = Slice(allocator, cache), layer_stack(1)
    for seqs in (1, 3, 64, 65, 128):
        found = [one.step(layers, seqs) for _ in range(3)]
        assert found == [(0, 0), (1, 1), (1, 0)]
        assert cache.counted == 3
        cache.counted = 0
    assert one.launch.rows == [1, 4, 64, 68, 128], "padded as its graph is"
    assert one.launch.counts["gemm"] == 2 * 3 * 5, "as many as have run"


def test_the_first_step_of_a_size_is_launched_with_the_rows_of_its_graph(
    allocator: FakeAllocator,
) -> None:
    """Also where a larger graph could serve it: kernels are chosen by the number of rows."""
    one, layers = Slice(allocator, Cache()), layer_stack(1)
    assert [one.step(layers, 30) for _ in range(2)] == [(0, 0), (1, 1)]
    assert [one.step(layers, 13) for _ in range(2)] == [(0, 0), (1, 1)]
    assert one.launch.rows == [32, 16]


def test_a_size_that_waits_for_its_capture_is_served_by_a_larger_graph(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_cache, "_STEPS_PER_CAPTURE", 4)
    monkeypatch.setattr(graph_cache, "_BURST", 1)
    one, layers = Slice(allocator, Cache()), layer_stack(1)
    assert [one.step(layers, 32) for _ in range(2)] == [(0, 0), (1, 1)]
    assert [one.step(layers, 16) for _ in range(5)] == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 0)]


def test_contexts_get_longer_and_shorter(allocator: FakeAllocator) -> None:
    """Graphs of short contexts stay; the pool takes the next graph in either case."""
    one, layers = Slice(allocator, Cache()), layer_stack(1)
    for context in (512, 8192, 512, 16000, 600):
        for _ in range(2):
            one.step(layers, 2, context=context)
        assert one.step(layers, 2, context=context) == (1, 0)
    assert (one.graphs.captures, one.graphs.dropped, one.graphs.failures) == (3, 0, 0)


def test_models_share_graphs_of_few_sequences_only(allocator: FakeAllocator) -> None:
    one, models = Slice(allocator, Cache()), [layer_stack(1), layer_stack(2)]
    for seqs, expected in ((4, 1), (80, 2)):
        before = one.graphs.captures
        for _ in range(3):
            for layers in models:
                one.step(layers, seqs)
        assert one.graphs.captures - before == expected


def test_a_model_whose_weights_move_loses_the_graphs_that_knew_them(
    allocator: FakeAllocator,
) -> None:
    cache = Cache()
    one, layers = Slice(allocator, cache), layer_stack(1)
    for _ in range(2):
        one.step(layers, 80)
        one.step(layers, 4)
    cache.move()
    assert one.step(layers, 80) == (1, 0), "another model's weights came or went"
    cache.move(shift=1 << 20)
    assert one.step(layers, 80) == (0, 0)
    assert one.graphs.dropped == 1
    assert one.step(layers, 80) == (1, 1)
    handles = [w for layer in one.launch.layers[-1] for w in matrices(layer)]
    assert all(w.home == "hbm" for w in handles)
    cache.move(resident=False)
    assert [one.step(layers, 80)[0] for _ in range(3)] == [0, 0, 0]
    assert one.step(layers, 4)[0] == 0
    assert [one.step(layers, 4)[0] for _ in range(2)] == [1, 1], "maps say where weights are"


def test_weights_that_are_to_be_kept_are_launched_one_by_one(allocator: FakeAllocator) -> None:
    cache = Cache(resident=False, wanted=True)
    one, layers = Slice(allocator, cache), layer_stack(1)
    assert [one.step(layers, 4)[0] for _ in range(3)] == [0, 0, 0]
    assert cache.counted == 0, "weights are counted as they are asked for"


def test_a_capture_that_fails_is_launched_one_by_one(
    allocator: FakeAllocator, caplog: pytest.LogCaptureFixture
) -> None:
    one, layers = Slice(allocator, Cache()), layer_stack(1)
    for seqs in (4, 80):
        allocator.fails.append("end")
        assert [one.step(layers, seqs) for _ in range(4)] == [(0, 0)] * 4
    assert one.graphs.failures == len(caplog.records) == 2
    assert [one.step(layers, 8) for _ in range(3)] == [(0, 0), (1, 1), (1, 0)]
    assert one.launch.counts["gemm"] == 2 * 11, "what was captured in vain did not run"


def test_graphs_do_not_keep_a_model(allocator: FakeAllocator) -> None:
    one, layers = Slice(allocator, Cache()), layer_stack(1)
    for _ in range(2):
        one.step(layers, 80)
    assert len(one.graphs._models) == 1
    one.launch.layers.clear()
    del layers
    gc.collect()
    assert len(one.graphs._models) == 0
    other = layer_stack(2)
    for _ in range(2):
        one.step(other, 96)
    assert one.graphs.dropped == 1


def test_mixed_steps_know_where_weights_are(allocator: FakeAllocator) -> None:
    """All in HBM: nothing is looked up by a GEMM, and all of it is counted at once."""
    cache = Cache()
    one, layers = Slice(allocator, cache), layer_stack(1)
    one.step(layers, 4, prompt=30)
    found = [w for layer in one.launch.layers[-1] for w in matrices(layer)]
    assert [w.home for w in found] == ["hbm"] * len(found)
    assert cache.counted == 1
    cache.move(resident=False)
    one.step(layers, 4, prompt=30)
    assert {w.home for layer in one.launch.layers[-1] for w in matrices(layer)} == {"host"}
    assert cache.counted == 1


def test_batches_of_very_unequal_contexts_have_no_graph(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scratch would be of the longest one's size for each."""
    monkeypatch.setattr(graphs_module, "_TOKENS_MOST", 64 * 1024)
    one, layers = Slice(allocator, Cache()), layer_stack(1)
    assert [one.step(layers, 64)[0] for _ in range(2)] == [0, 1]
    assert [one.step(layers, 64, context=1100)[0] for _ in range(3)] == [0, 0, 0]
    assert [one.step(layers, 80)[0] for _ in range(3)] == [0, 0, 0]
    assert one.launch.rows[-1] == bucket(80)


@pytest.mark.parametrize("by_places", [False, True])
def test_graphs_may_depend_on_which_weights_are_in_hbm(
    allocator: FakeAllocator, by_places: bool
) -> None:
    layers, cache = layer_stack(1), Cache()
    one = Slice(allocator, cache, by_places=by_places)
    handles = [w for layer in layers for w in matrices(layer)]
    captured: list[list[Home]] = []
    for away in ({0}, {0, 2}, {0}, set(range(len(handles)))):
        cache.move(away=frozenset(handles[i].pointer for i in away))
        before = one.graphs.captures
        for _ in range(3):
            one.step(layers, 4)
        if one.graphs.captures > before:
            captured.append([w.home for layer in one.launch.layers[-1] for w in matrices(layer)])
    everywhere: list[Home] = ["host"] * len(handles)
    if by_places:
        first: list[Home] = ["host", *(["hbm"] * (len(handles) - 1))]
        second: list[Home] = ["host", "hbm", "host", *(["hbm"] * (len(handles) - 3))]
        assert captured == [first, second, everywhere]
    else:
        assert captured == [everywhere]
