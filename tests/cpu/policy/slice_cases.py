"""Requests, models and worlds for tests of a slice's policy."""

from dataclasses import replace

from hypothesis import strategies as st
from slice_world import SliceTestWorld

from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import BLOCK_TOKENS, Request, Slo

SLAB = 4096
SLOS = [Slo(0.1, 0.01), Slo(1.0, 0.1), Slo(8.0, 1.0)]


def spec(name: str = "m", block: int = 512) -> ModelSpec:
    return ModelSpec(name, 1 << 20, 2, block, 4096)


def small_slice(slabs: int = 16, max_batch: int = 8, tokens: int = 64) -> Slice:
    return Slice(
        "s", "cpu", kv_bytes=slabs * SLAB, slab_bytes=SLAB, max_batch=max_batch,
        max_step_tokens=tokens,
    )  # fmt: skip


def request(
    name: str, model: str = "m", prompt: int = 20, new: int = 8, at: float = 0.0, family: int = 0,
    slo: Slo = SLOS[1], shared: int = 0,
) -> Request:  # fmt: skip
    """The first `shared` blocks' hashes are those of its family, the others its own."""
    hashes = tuple(
        (family if i < shared else hash_of(name)) * 1000 + i for i in range(prompt // BLOCK_TOKENS)
    )
    return Request(name, model, prompt, new, at, slo, hashes)


def hash_of(name: str) -> int:
    return 100 + sum(ord(c) * 31**i for i, c in enumerate(name))


requests = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(1, 200), st.integers(1, 40), st.floats(0, 2),
        st.integers(0, 2), st.integers(0, 12), st.integers(1, 60), st.none() | st.floats(0, 3),
        st.sampled_from(SLOS), st.booleans(),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


def world_of(
    drawn: list, seed: int, slabs: int, in_flight: int, park: float, fail: float,
    blocks: tuple[int, int, int] = (512, 1000, 6000), host_blocks: int = 0, lanes: int = 1,
    link: float = 0.0,
) -> SliceTestWorld:  # fmt: skip
    specs = [spec(name, block) for name, block in zip("abc", blocks, strict=True)]
    slice_ = replace(small_slice(slabs), host_kv_bytes=host_blocks * 1000, link_bytes_per_s=link)
    if lanes > 1:
        slice_ = replace(slice_, kind="gpu", gpu=GpuShare("GPU", 0), lanes=lanes)
    world = SliceTestWorld(slice_, seed, specs, in_flight, park, fail, contents=True)
    world.activate()
    for i, (model, prompt, new, at, family, shared, stop, cancel, slo, chained) in enumerate(drawn):
        one = request(f"r{i}", model, prompt, new, at, family, slo, shared)
        world.submit_at(at, one, stop, chained)
        if cancel is not None:
            world.withdraw(at + cancel, one.id)
    return world
