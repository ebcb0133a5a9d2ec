"""A segment holds exactly what the plan says, whatever the checkpoint looks like."""

import errno
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from checkpoints import Model, Stored, layered, random_tensor, write_file, write_sharded
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from readers import GatedReader, ThrottledReader, eventually
from safetensors.numpy import save_file

from c2cserve.core.tensors import Dtype
from c2cserve.memory import loader as loader_module
from c2cserve.memory.checkpoint import CheckpointError, open_checkpoint
from c2cserve.memory.layout import GroupPlan, LayoutPlan, Part, PlanError, TensorPlan
from c2cserve.memory.loader import LoadCancelled, Loader, Read, pread
from c2cserve.memory.segment import Segment, State

DTYPES: list[Dtype] = ["float32", "float16", "bfloat16"]


def load(directory: Path, plan: LayoutPlan, *, read: Read = pread, threads: int = 3) -> Segment:
    sources = open_checkpoint(directory, plan)
    segment = Segment.create(directory / "segment", plan, sources)
    Loader(segment, plan, sources, threads=threads, read=read).run()
    return segment


def assert_holds(segment: Segment, model: Model) -> None:
    for tensor in model.tensors:
        assert segment.raw(tensor.name).tobytes() == model.expected(tensor.name), tensor.name
        assert segment.tensors[tensor.name].shape == tensor.shape
        assert segment.tensors[tensor.name].dtype == tensor.dtype


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Targets fused out of whole checkpoint tensors and out of runs of shared ones, dealt to
    groups in any order."""
    model = Model()
    parts: list[Part] = []
    for t in range(draw(st.integers(1, 5))):
        offset = 0
        for p in range(draw(st.integers(1, 4))):
            shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
            source = f"model.{t}.{p}"
            model.stored[source] = random_tensor(shape, draw(st.sampled_from(DTYPES)), 7 * t + p)
            size = model.stored[source].values.size
            begin = draw(st.integers(0, size - 1))
            count = draw(st.integers(1, size - begin))
            whole = draw(st.booleans())
            part = (
                Part(source, shape, f"t{t}", offset)
                if whole
                else Part(source, shape, f"t{t}", offset, begin, count)
            )
            parts.append(part)
            offset += part.elements
        dtype = draw(st.sampled_from(DTYPES))
        model.tensors.append(TensorPlan(f"t{t}", (offset,), dtype, draw(st.booleans())))
    order = draw(st.permutations(parts))
    cuts = sorted(draw(st.sets(st.integers(0, len(order)), max_size=4)) | {0, len(order)})
    for begin, end in itertools.pairwise(cuts):
        model.groups.append(GroupPlan(f"g{begin}", tuple(order[begin:end])))
    return model


@settings(max_examples=examples(60), deadline=None)
@given(model=models(), shards=st.integers(1, 3), chunk=st.sampled_from([16, 64, 8 << 20]))
def test_any_plan_over_any_checkpoint(model: Model, shards: int, chunk: int) -> None:
    with TemporaryDirectory() as name, patch.object(loader_module, "_CHUNK_BYTES", chunk):
        directory = Path(name)
        if shards == 1:
            write_file(directory / "model.safetensors", model.stored, pad=chunk % 7)
        else:
            dealt: dict[str, dict[str, Stored]] = {
                f"part-{i}.safetensors": {} for i in range(shards)
            }
            for i, (tensor, stored) in enumerate(model.stored.items()):
                dealt[f"part-{i % shards}.safetensors"][tensor] = stored
            write_sharded(directory, {file: of for file, of in dealt.items() if of})
        segment = load(directory, model.plan)
        assert segment.state is State.READY
        assert all(segment.ready(group) for group in range(len(segment.groups)))
        assert segment.loaded_bytes == model.plan.bytes
        assert_holds(segment, model)
        assert_holds(Segment.open(segment.path), model)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_conversion_of_every_dtype_over_chunk_borders(
    tmp_path: Path, stored: Dtype, wanted: Dtype
) -> None:
    model = layered(2, (3, 1001), dtype=wanted, stored=stored)
    write_file(tmp_path / "model.safetensors", model.stored, pad=3)
    with patch.object(loader_module, "_CHUNK_BYTES", 1000):
        assert_holds(load(tmp_path, model.plan), model)


def test_tensors_larger_than_a_chunk(tmp_path: Path) -> None:
    """With the real chunk size, parts that begin and end anywhere."""
    model = layered(2, (1025, 4099), dtype="bfloat16", stored="bfloat16")
    write_file(tmp_path / "model.safetensors", model.stored, pad=5)
    assert_holds(load(tmp_path, model.plan), model)


def test_the_safetensors_library_writes_what_we_read(tmp_path: Path) -> None:
    values = {f"w{i}": np.random.default_rng(i).random((5, i + 1), np.float32) for i in range(4)}
    save_file(values, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = Model(stored={name: Stored(array, "float32") for name, array in values.items()})
    for name, array in values.items():
        model.tensors.append(TensorPlan(name, array.shape, "float32"))
        model.groups.append(GroupPlan(name, (Part(name, array.shape, name),)))
    assert_holds(load(tmp_path, model.plan), model)


def test_rows_can_be_found_in_the_file_before_they_are_loaded(tmp_path: Path) -> None:
    model = layered(2, (9, 4), dtype="float32", stored="bfloat16")
    file = write_file(tmp_path / "model.safetensors", model.stored)
    segment = Segment.create(tmp_path / "s", model.plan, open_checkpoint(tmp_path, model.plan))
    row = segment.row_sources["layers.1"]
    stored = model.stored["model.layers.1.weight"]
    at = row.offset + 6 * 4 * 2
    assert row.path == file
    assert row.dtype == "bfloat16"
    assert file.read_bytes()[at : at + 8] == stored.bytes[6 * 4 * 2 : 7 * 4 * 2]


# ---- order ------------------------------------------------------------------------------------


def start(segment: Segment, plan: LayoutPlan, directory: Path, read: Read, threads: int) -> Loader:
    return Loader(segment, plan, open_checkpoint(directory, plan), threads=threads, read=read)


def group_of(offset: int, model: Model, sources: dict[str, int]) -> int:
    """Which group the bytes at a file offset belong to."""
    names = [part.source for group in model.groups for part in group.parts]
    return max((sources[name], i) for i, name in enumerate(names) if sources[name] <= offset)[1]


@pytest.fixture
def slow_model(tmp_path: Path) -> tuple[Model, dict[str, int], Segment]:
    """Twelve groups of four chunks each, not loaded yet; and where their tensors lie."""
    model = layered(12, (64, 4))
    write_file(tmp_path / "model.safetensors", model.stored)
    sources = open_checkpoint(tmp_path, model.plan)
    segment = Segment.create(tmp_path / "s", model.plan, sources)
    return model, {name: source.offset for name, source in sources.items()}, segment


def test_groups_come_in_order_and_wanted_ones_first(
    slow_model: tuple[Model, dict[str, int], Segment], tmp_path: Path
) -> None:
    model, offsets, segment = slow_model
    gate = GatedReader()
    became: list[int] = []
    with patch.object(loader_module, "_CHUNK_BYTES", 256):
        loader = Loader(
            segment, model.plan, open_checkpoint(tmp_path, model.plan),
            threads=1, read=gate, on_group=became.append,
        )  # fmt: skip
        thread = threading.Thread(target=loader.run)
        thread.start()
        gate.allow(5)  # all of group 0 and a first chunk of group 1
        gate.wait_for_reads(6)
        segment.want(9)
        segment.want(4)
        gate.open()
        thread.join(20)
    read = [group_of(offset, model, offsets) for offset in gate.offsets]
    # The read in flight when they were wanted still belongs to group 1; then wanted ones go first.
    assert read == [0] * 4 + [1] * 2 + [4] * 4 + [9] * 4 + [1] * 2 + [
        group for group in (2, 3, 5, 6, 7, 8, 10, 11) for _ in range(4)
    ]
    assert became == [0, 4, 9, 1, 2, 3, 5, 6, 7, 8, 10, 11]


def test_what_is_ready_is_complete_while_the_rest_still_loads(
    slow_model: tuple[Model, dict[str, int], Segment], tmp_path: Path
) -> None:
    model, _, segment = slow_model
    loader = start(segment, model.plan, tmp_path, ThrottledReader(100e3, 100), threads=3)
    reader = Segment.open(segment.path)
    seen: list[int] = []
    thread = threading.Thread(target=loader.run)
    thread.start()
    while len(seen) < 12:
        assert reader.state is not State.FAILED
        for group in range(12):
            if group not in seen and reader.ready(group):
                name = f"layers.{group}"
                assert reader.raw(name).tobytes() == model.expected(name)
                if not seen:
                    assert reader.state is State.LOADING
                seen.append(group)
    thread.join(20)
    assert seen[0] < 3, "three threads work on the first three groups"
    assert reader.state is State.READY


# ---- what goes wrong --------------------------------------------------------------------------


def test_cancel_ends_a_load_soon_and_marks_it_failed(
    slow_model: tuple[Model, dict[str, int], Segment], tmp_path: Path
) -> None:
    model, _, segment = slow_model
    gate = GatedReader()
    loader = start(segment, model.plan, tmp_path, gate, threads=2)
    with ThreadPoolExecutor() as executor:
        run = executor.submit(loader.run)
        gate.wait_for_reads(2)
        loader.cancel()
        gate.open()
        with pytest.raises(LoadCancelled):
            run.result(20)
    assert segment.state is State.FAILED
    assert len(gate.offsets) == 2, "no read begins after a cancel"


def test_a_file_that_shrinks_during_the_load(
    slow_model: tuple[Model, dict[str, int], Segment], tmp_path: Path
) -> None:
    model, offsets, segment = slow_model
    loader = start(segment, model.plan, tmp_path, pread, threads=1)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(offsets["model.layers.7.weight"] + 10)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ended at byte \d+"):
        loader.run()
    assert segment.state is State.FAILED
    assert segment.ready(6), "what was loaded before stays"
    assert not segment.ready(7)


def test_a_failing_disk(slow_model: tuple[Model, dict[str, int], Segment], tmp_path: Path) -> None:
    model, _, segment = slow_model

    def broken(fd: int, buffer: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    loader = start(segment, model.plan, tmp_path, broken, threads=1)
    with pytest.raises(CheckpointError, match="Input/output error"):
        loader.run()
    assert segment.state is State.FAILED


def test_a_plan_that_leaves_or_repeats_elements_is_refused() -> None:
    def plan(*parts: Part) -> LayoutPlan:
        return LayoutPlan((TensorPlan("t", (8,), "float32"),), (GroupPlan("g", parts),))

    plan(Part("a", (4,), "t"), Part("b", (4,), "t", 4)).check()
    for wrong in (
        plan(Part("a", (4,), "t")),
        plan(Part("a", (3,), "t"), Part("b", (4,), "t", 4)),
        plan(Part("a", (5,), "t"), Part("b", (4,), "t", 4)),
        plan(Part("a", (4,), "t"), Part("b", (5,), "t", 4)),
    ):
        with pytest.raises(PlanError, match="t: "):
            wrong.check()


def test_readers_wait_for_what_they_want(
    slow_model: tuple[Model, dict[str, int], Segment], tmp_path: Path
) -> None:
    """Through a mapping of its own, as a worker has: the last group, wanted, comes long before the
    load ends."""
    model, _, segment = slow_model
    gate = GatedReader(allowed=1)
    loader = start(segment, model.plan, tmp_path, gate, threads=1)
    worker = Segment.open(segment.path)
    thread = threading.Thread(target=loader.run)
    thread.start()
    gate.wait_for_reads(2)
    worker.want(11)
    gate.allow(2)
    eventually(lambda: worker.ready(11))
    assert worker.state is State.LOADING
    assert not worker.ready(2)
    gate.open()
    thread.join(20)
    assert worker.state is State.READY
