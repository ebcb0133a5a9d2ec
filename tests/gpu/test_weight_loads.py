"""Whole models loaded beside steps on a real GPU: no bit of an answer depends on it.

`pytest -m gpu -s tests/gpu/test_weight_loads.py` prints the rates."""

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_case import CASES, LateModel, make, no_sampler, shared_folder
from gpu_engine_case import OTHER, PROMPT
from swapping_case import LARGE, SLAB_BYTES, SwappingSlice, make_seeded

from c2cserve.core.actions import Fetch, Release
from c2cserve.core.events import Fetched
from c2cserve.engine.gpu.peers import open_peers
from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.engine.gpu.tables import matrices_by_layer
from c2cserve.kernels.gpu.driver import copy_async
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.policy.weights.lending import Lending
from c2cserve.transfer.gpus import engine_of

pytestmark = pytest.mark.gpu

SMALL = CASES["llama"][1]
MIB = 1 << 20
NEW = 60


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


@pytest.fixture(params=[1, 2], ids=["one lane", "two lanes"])
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[[int], SwappingSlice]]:
    """Opens slices, and closes them in the end."""
    before, grad = torch.cuda.current_stream(), torch.is_grad_enabled()
    slices: list[SwappingSlice] = []

    def open_slice(hbm_bytes: int) -> SwappingSlice:
        slices.append(SwappingSlice(hbm_bytes, lanes=request.param))
        return slices[-1]

    yield open_slice
    for one in slices:
        one.close()
    torch.cuda.synchronize()
    torch.cuda.set_stream(before)
    torch.set_grad_enabled(grad)


def show(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")


def wait_for(slice_: SwappingSlice, *models: str, limit_s: float = 60.0) -> None:
    """Run until the last word on each of these models' loads is that all of it is there."""
    end_s = time.monotonic() + limit_s
    while True:
        state = {event.model: event.refused for event in slice_.fetched}
        if all(state.get(model) is False for model in models):
            return
        slice_.tick()
        assert time.monotonic() < end_s, state


def test_answers_are_the_same_with_and_without_a_load(
    opened: Callable[[int], SwappingSlice], folder: Path
) -> None:
    """Prompts by both kinds of GEMMs, decoding with and without graphs; out of HBM, streamed."""
    slice_ = opened(256 * MIB)
    checkpoint = make_seeded(folder / "m", 1, SMALL)
    slice_.attach("kept", checkpoint)
    slice_.attach("streamed", checkpoint, keep=False)
    for turn, prompt in enumerate((PROMPT, OTHER[:40])):
        for model in ("kept", "streamed"):
            slice_.submit(f"{model}{turn}", model, prompt, NEW)
            slice_.finish(f"{model}{turn}")
        assert slice_.tokens(f"kept{turn}") == slice_.tokens(f"streamed{turn}")
    assert slice_.loaded == ["kept"]
    assert [event.refused for event in slice_.fetched] == [False]
    stats = slice_.stats
    assert stats.weight_fetches == 1
    assert stats.weights_kept_bytes == stats.weight_fetched_bytes > 10 * MIB
    assert stats.weights_hit_bytes > 0
    assert stats.weights_streamed_bytes > 0


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3-tied"])
def test_every_matrix_that_steps_read_is_loaded(
    opened: Callable[[int], SwappingSlice], folder: Path, case: str
) -> None:
    slice_ = opened(256 * MIB)
    slice_.attach("m", make(folder, case))
    slice_.submit("first", "m", PROMPT[:48], NEW)
    slice_.finish("first")
    streamed = slice_.stats.weights_streamed_bytes
    slice_.submit("second", "m", PROMPT[:48], NEW)
    slice_.finish("second")
    assert slice_.tokens("first") == slice_.tokens("second")
    assert slice_.stats.weights_streamed_bytes == streamed == 0


def test_models_take_turns_where_one_fits_and_answer_as_alone(
    opened: Callable[[int], SwappingSlice], folder: Path
) -> None:
    checkpoints = {name: make_seeded(folder / name, i, SMALL) for i, name in enumerate("abc")}
    roomy = opened(512 * MIB)
    for name, checkpoint in checkpoints.items():
        size = roomy.attach(name, checkpoint).weight_bytes
        roomy.submit(name, name, PROMPT[:100], NEW)
        roomy.finish(name)
    roomy.settle()
    tight = opened(2 * size + 8 * SLAB_BYTES)
    for name, checkpoint in checkpoints.items():
        tight.attach(name, checkpoint)
    for turn in range(3):
        for name in checkpoints:
            tight.submit(f"{name}{turn}", name, PROMPT[:100], NEW)
    tight.finish(*(f"{name}{turn}" for name in checkpoints for turn in range(3)))
    for turn in range(3):
        for name in checkpoints:
            assert tight.tokens(f"{name}{turn}") == roomy.tokens(name)
    assert tight.dropped, "all three fitted"
    assert tight.stats.weight_releases > 0
    show(f"loads {tight.loaded}, releases {tight.dropped}, {tight.stats.weight_fetches_refused=}")


@pytest.mark.parametrize("opened", [2], indirect=True)
def test_models_come_and_go_beside_a_stream_and_answer_as_alone(
    opened: Callable[[int], SwappingSlice], folder: Path
) -> None:
    """Two of three models fit, and a fourth is never loaded."""
    checkpoints = {name: make_seeded(folder / name, i, SMALL) for i, name in enumerate("abc")}
    roomy = opened(512 * MIB)
    size = roomy.attach("a", checkpoints["a"]).weight_bytes
    slice_ = opened(2 * size + 8 * SLAB_BYTES)
    slice_.attach("stream", make_seeded(folder / "stream", 9, LARGE), keep=False)
    for name, checkpoint in checkpoints.items():
        slice_.attach(name, checkpoint)
    models = ("stream", *checkpoints)
    for name in models:
        slice_.submit(f"{name} alone", name, PROMPT[:64], NEW)
        slice_.finish(f"{name} alone")
    for turn in range(3):
        for name in models:
            slice_.submit(f"{name}{turn}", name, PROMPT[:64], NEW)
    slice_.finish(*(f"{name}{turn}" for name in models for turn in range(3)))
    for name in models:
        for turn in range(3):
            assert slice_.tokens(f"{name}{turn}") == slice_.tokens(f"{name} alone"), name
    assert slice_.lanes["stream"] == {"streaming"}
    assert all("resident" in slice_.lanes[name] for name in checkpoints)
    assert slice_.dropped, "all three fitted"
    show(f"loads {slice_.loaded}, lanes {slice_.lanes}, {slice_.gpu.fence.waits=}")


def test_a_load_beside_decoding_changes_nothing_and_is_as_fast_as_a_copy(
    opened: Callable[[int], SwappingSlice], folder: Path
) -> None:
    slice_ = opened(3000 * MIB)
    slice_.attach("small", make_seeded(folder / "small", 1, SMALL))
    spec = slice_.attach("large", make_seeded(folder / "large", 2, LARGE))
    for name in ("alone", "warm"):
        slice_.submit(name, "small", PROMPT[:64], 400)
        slice_.finish(name)
    begun_s = time.monotonic()
    slice_.submit("timed", "small", PROMPT[:64], 400)
    slice_.finish("timed")
    alone_s = (time.monotonic() - begun_s) / 400
    slice_.submit("beside", "small", PROMPT[:64], 400)
    while len(slice_.tokens("beside")) < 20:
        slice_.tick()
    loads = slice_.gpu.loads
    assert loads is not None
    at = len(slice_.tokens("beside"))
    begun_s = time.monotonic()
    slice_.submit("wakes", "large", PROMPT[:16], 1)  # the policy fetches the model for it
    wait_for(slice_, "large")
    beside_s = (time.monotonic() - begun_s) / max(1, len(slice_.tokens("beside")) - at)
    took_s = slice_.fetched[-1].took_s
    slice_.finish("beside", "wakes")
    assert slice_.tokens("beside") == slice_.tokens("alone") == slice_.tokens("timed")
    copied = slice_.stats.weight_fetched_bytes
    slice_.engine.submit(Release("large"))
    slice_.engine.submit(Fetch("large", slice_.policy.arena.end_bytes))
    begun_s = time.monotonic()
    while not any(isinstance(event, Fetched) for event in slice_.events):
        slice_.engine.poll()
    idle_s = time.monotonic() - begun_s
    size = slice_.stats.weight_fetched_bytes - copied
    plain_s = plain_copy_s(size)
    show(
        f"{size / 1e9:.2f} GB (weights {spec.weight_bytes / 1e9:.2f}): plain copy"
        f" {size / plain_s / 1e9:.1f} GB/s, load of an idle slice {size / idle_s / 1e9:.1f},"
        f" beside decoding {size / took_s / 1e9:.1f}; a decode step {1e3 * alone_s:.2f} ms alone,"
        f" {1e3 * beside_s:.2f} beside a load"
    )
    slice_.events.clear()
    assert idle_s < 1.25 * plain_s + 0.005
    assert took_s < 1.5 * plain_s + 0.02


def plain_copy_s(size: int) -> float:
    """Return how long one copy of so many bytes from pinned memory takes."""
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        begun_s = time.monotonic()
        stream = torch.cuda.current_stream().cuda_stream
        copy_async(target.data_ptr(), source.data_ptr(), size, stream)
        torch.cuda.synchronize()
        best = min(best, time.monotonic() - begun_s)
    return best


def test_a_cancelled_load_leaves_the_arena_to_kv_and_to_others(
    opened: Callable[[int], SwappingSlice], folder: Path
) -> None:
    slice_ = opened(1500 * MIB)
    slice_.attach("small", make_seeded(folder / "small", 1, SMALL), keep=False)
    slice_.attach("large", make_seeded(folder / "large", 2, LARGE))
    slice_.tick()
    slice_.submit("alone", "small", PROMPT[:64], NEW)
    slice_.finish("alone")
    slice_.engine.submit(Fetch("large", slice_.policy.arena.end_bytes))
    wait_for(slice_, "large")  # its segment is registered from now on: loads begin at once
    slice_.engine.submit(Release("large"))
    loads, cache = slice_.gpu.loads, slice_.gpu.cache
    assert loads is not None
    assert cache is not None
    for turn in range(8):
        slice_.engine.submit(Fetch("large", slice_.policy.arena.end_bytes))
        time.sleep(0.0015 * turn)  # the load takes longer
        if turn % 2:
            slice_.engine.poll()
        if turn < 4:
            slice_.engine.submit(Release("large"))
        else:
            # KV takes all of the arena: what is written there now must not be overwritten.
            loads.make_room(None)
            cache.make_room(None)
            slice_.gpu.arena.fill_(7)
            slice_.gpu.finish()
            assert bool((slice_.gpu.arena == 7).all())
        slice_.engine.poll()
        assert cache.bytes == 0
        slice_.events[:] = [one for one in slice_.events if not isinstance(one, Fetched)]
        slice_.submit(f"after{turn}", "small", PROMPT[:64], NEW)
        slice_.finish(f"after{turn}")
        assert slice_.tokens(f"after{turn}") == slice_.tokens("alone")
    assert loads.counts.cancelled == 8
    slice_.engine.submit(Fetch("large", slice_.policy.arena.end_bytes))
    while not slice_.events:
        slice_.engine.poll()
    done = slice_.events.pop()
    assert isinstance(done, Fetched)
    assert not done.refused
    check_bytes(slice_.gpu)


def check_bytes(gpu: GpuParts) -> None:
    """What is in the cache is what is at home."""
    assert gpu.cache is not None
    assert gpu.cache._entries
    for address, entry in gpu.cache._entries.items():
        near = entry.handle.owner
        assert isinstance(near, torch.Tensor)
        home = (ctypes.c_uint8 * near.numel()).from_address(address)
        assert torch.equal(near.cpu(), torch.frombuffer(home, dtype=torch.uint8))


def test_models_that_come_and_go_under_load(
    opened: Callable[[int], SwappingSlice], folder: Path
) -> None:
    """Detached while it loads, while steps of others run; attached again at once."""
    slice_ = opened(1500 * MIB)
    small, large = make_seeded(folder / "s", 1, SMALL), make_seeded(folder / "l", 2, LARGE)
    slice_.attach("small", small)
    slice_.submit("alone", "small", PROMPT[:64], 200)
    slice_.finish("alone")
    slice_.submit("stays", "small", PROMPT[:64], 200)
    for _ in range(5):
        slice_.attach("large", large)
        slice_.tick()
        slice_.engine.submit(Fetch("large", slice_.policy.arena.end_bytes))
        for _ in range(3):
            slice_.tick()
        slice_.detach("large")
    slice_.finish("stays")
    assert slice_.tokens("stays") == slice_.tokens("alone")
    assert slice_.gpu.cache is not None
    assert set(slice_.gpu.cache._whole) <= {"small"}


def test_a_model_larger_than_the_arena_streams_and_says_so(
    opened: Callable[[int], SwappingSlice], folder: Path
) -> None:
    slice_ = opened(16 * MIB)
    checkpoint = make_seeded(folder / "m", 1, {**SMALL, "num_hidden_layers": 8})
    slice_.attach("m", checkpoint, keep=False)
    slice_.submit("a", "m", PROMPT[:48], NEW)
    slice_.finish("a")
    slice_.engine.submit(Fetch("m", slice_.policy.arena.end_bytes))
    slice_.engine.poll()
    assert slice_.events.pop() == Fetched("m", 0.0, refused=True)
    slice_.submit("b", "m", PROMPT[:48], NEW)
    slice_.finish("b")
    assert slice_.tokens("a") == slice_.tokens("b")
    assert slice_.stats.weight_fetches_refused == 1
    assert slice_.stats.weights_kept_bytes == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour")
def test_a_load_out_of_a_neighbours_memory_is_faster(folder: Path) -> None:
    """Over NVLink: the same bytes, several times as fast."""
    before = torch.cuda.current_stream()
    with torch.no_grad():
        transfers = engine_of((0, 1))
        peers = open_peers(transfers, 0, [1], 1500 * MIB, Lending(1500 * MIB))
        gpu = open_gpu(
            0, 1500 * MIB, no_sampler, profile="assumed", swaps_weights=True, peers=peers,
            transfers=transfers,
        )  # fmt: skip
    segments = PinnedSegments(peers=peers)
    checkpoint = make_seeded(folder / "l", 2, LARGE)
    model = LateModel(checkpoint, 1024, device=gpu.device, open_=segments.open).load_all()
    loads = gpu.loads
    assert loads is not None
    assert gpu.peers is not None
    end_s = time.monotonic() + 30
    while gpu.peers.pool.bytes < 0.8 * model.path.stat().st_size:
        gpu.peers.refresh()
        assert time.monotonic() < end_s, "nothing is copied to the neighbour"
        time.sleep(0.05)
    time.sleep(1.0)
    gpu.peers.refresh()
    rate = timed_load(gpu, model)
    show(f"from a neighbour: {rate / 1e9:.0f} GB/s")
    assert rate > 100e9
    gpu.finish()
    loads.release("l")
    segments.close(model.path)
    torch.cuda.set_stream(before)


def timed_load(gpu: GpuParts, model: LateModel) -> float:
    """Load a model, check its bytes, and return the bytes per second."""
    loads = gpu.loads
    assert loads is not None

    def locate() -> list[list[WeightHandle]]:
        prepared = model.decoder.prepared(gpu.ops)
        assert prepared is not None
        return matrices_by_layer(*prepared, gpu.device)

    locate()
    gpu.finish()
    copied = loads.counts.copied_bytes
    begun_s = time.monotonic()
    loads.fetch("l", locate, 0)
    while not (outcomes := loads.poll()):
        pass
    took_s = time.monotonic() - begun_s
    assert not outcomes[0].refused
    check_bytes(gpu)
    return (loads.counts.copied_bytes - copied) / took_s


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a neighbour")
def test_a_load_over_the_link_of_a_neighbour_too(folder: Path) -> None:
    """A GPU without slices relays: the same bytes over two links."""
    before = torch.cuda.current_stream()
    transfers = engine_of((0, 1))
    with torch.no_grad():
        gpu = open_gpu(
            0, 1500 * MIB, no_sampler, profile="assumed", swaps_weights=True, transfers=transfers
        )
    segments = PinnedSegments()
    checkpoint = make_seeded(folder / "l", 2, LARGE)
    model = LateModel(checkpoint, 1024, device=gpu.device, open_=segments.open).load_all()
    loads = gpu.loads
    assert loads is not None
    relayed = transfers.counts()["in1"].relayed_bytes
    rates: list[float] = []
    for _ in range(3):
        rates.append(timed_load(gpu, model))
        loads.release("l")
    show(f"over two links: {', '.join(f'{rate / 1e9:.0f}' for rate in rates)} GB/s")
    assert transfers.counts()["in1"].relayed_bytes > relayed
    gpu.finish()
    segments.close(model.path)
    torch.cuda.set_stream(before)
