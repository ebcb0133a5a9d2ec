"""Segments that GPU slices share: one registration each, in pieces that steps use at once, given
back when nobody reads any more."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_registrar import FakeRegistrar
from lane import Lane, LateModel
from tiny import make_checkpoint

from c2cserve.core.events import StepDone, StepFailed, StepParked
from c2cserve.engine.gpu.segments import PinnedSegments, Registering
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.models.layout import EMBED, HEAD, layer_group
from c2cserve.engine.weights import Weights, WeightsLost
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.memory.gradual_pinning import Pinner
from c2cserve.memory.peer_pool import Lendable

PAGE = 4096
PROMPT = [3, 5, 8, 13]


def slept(seconds: float) -> None:
    """A pause that takes no time."""


@dataclass
class Case:
    registrar: FakeRegistrar
    pinner: Pinner

    def segments(self, *parts: Any, **named: Any) -> PinnedSegments:
        return PinnedSegments(self.pinner, *parts, **named)

    def allow(self, pieces: int) -> None:
        """Let so many more pieces be registered, and wait until they are."""
        before = len(self.registrar.log)
        self.registrar.gate.release(pieces)
        waiting = threading.Event()
        while len(self.registrar.log) < before + pieces:
            assert not waiting.wait(1e-4)


@pytest.fixture
def case() -> Iterator[Case]:
    registrar = FakeRegistrar()
    case = Case(registrar, Pinner(registrar, piece_bytes=PAGE, sleep=slept))
    yield case
    registrar.gate.release(1000)
    case.pinner.finish()


def cold(case: Case) -> None:
    """Let nothing be registered from now on, until `allow` is called."""
    case.registrar.gate = threading.Semaphore(0)


def test_all_of_a_segment_is_registered_once_and_given_back_after_its_last_user(
    case: Case, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    path = LateModel(tmp_path).path
    segments = case.segments()
    first, second = segments.open(path), segments.open(path)
    assert first is second
    assert case.registrar.bytes == path.stat().st_size
    assert min(case.registrar.registered) == first.data.ctypes.data
    segments.close(path)
    case.pinner.finish()
    assert case.registrar.bytes == path.stat().st_size
    segments.close(path)
    case.pinner.finish()
    assert not case.registrar.registered
    assert segments.open(path) is not first
    segments.close_all()
    assert not case.registrar.registered


def decoder_of(model: LateModel, segments: PinnedSegments) -> Decoder:
    pinned = segments.begin(model.path)
    return Decoder(model.config, Weights(pinned.segment, pinned), 256)


def answer(lane: Lane) -> list[int]:
    lane.add("r", "m", PROMPT, 3)
    lane.finish("r")
    return lane.tokens("r")


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "qwen3-moe"])
def test_a_model_answers_as_soon_as_what_it_reads_is_registered(
    case: Case, tmp_path: Path, name: str
) -> None:
    """Its layers and its head come first. Rows of the embedding table are read on the host."""
    make_checkpoint(tmp_path, name)
    model = LateModel(tmp_path).load_all()
    warm, lane = Lane(), Lane()
    warm.attach("m", model.decoder)
    want = answer(warm)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()  # it is loaded: nothing is read there any more
    cold(case)
    segments = case.segments()
    pinned = segments.begin(model.path)
    weights = Weights(pinned.segment, pinned)
    lane.attach("m", Decoder(model.config, weights, 256))
    lane.add("r", "m", PROMPT, 3)
    assert isinstance(lane.step(("r", 0, 4)), StepParked)
    embed = weights.group(HEAD if model.config.tied else EMBED)
    pieces, left = -(-path_bytes(model) // PAGE // 30), -(-path_bytes(model) // PAGE)
    while not isinstance(lane.events[-1], StepDone):
        assert left, "all is registered, and it still waits"
        case.allow(min(pieces, left))
        left -= min(pieces, left)
        lane.executor.poll()
    missing = weights.missing([embed])
    assert bool(missing) == (not model.config.tied), "it did not wait for the table"
    done = lane.events[-1]
    assert isinstance(done, StepDone)
    lane.note(done)
    for position in range(len(PROMPT), len(PROMPT) + 2):
        lane.step(("r", position, 1))
    assert lane.tokens("r") == want
    segments.close(model.path)


def path_bytes(model: LateModel) -> int:
    return model.path.stat().st_size


def test_groups_that_are_loaded_are_missing_until_they_are_registered(
    case: Case, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    model = LateModel(tmp_path)
    cold(case)
    pinned = case.segments().begin(model.path)
    weights = Weights(pinned.segment, pinned)
    groups = [weights.group(layer_group(i)) for i in range(model.config.layers)]
    model.load([layer_group(0)])
    assert weights.missing(groups) == groups
    _, stop = pinned.segment.spans[groups[0]]
    while not pinned.readable(groups[0]):
        case.allow(1)
    assert weights.missing(groups) == groups[1:]
    assert case.registrar.bytes <= stop + PAGE, "the first layer came first"
    model.load_all()
    case.allow(-(-path_bytes(model) // PAGE) - len(case.registrar.log))
    assert weights.missing(groups) == []
    assert weights.complete


def test_a_whole_model_is_prepared_when_all_of_it_is_registered(case: Case, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    model = LateModel(tmp_path).load_all()
    cold(case)
    decoder, ops = decoder_of(model, case.segments()), CpuOps(1)
    pieces = -(-path_bytes(model) // PAGE)
    case.allow(pieces - 1)
    assert decoder.prepared(ops) is None
    case.allow(1)
    until(lambda: decoder.prepared(ops) is not None)


def until(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    while not condition():
        assert not waiting.wait(1e-4)


def test_memory_that_cuda_refuses_ends_the_model_here_and_nothing_stays_registered(
    case: Case, tmp_path: Path
) -> None:
    """A step that waits fails with the reason, and the slice hears of it once."""
    make_checkpoint(tmp_path, "llama")
    model = LateModel(tmp_path).load_all()
    cold(case)
    case.registrar.fails_at = 3
    segments, lane, registering = case.segments(), Lane(), Registering()
    pinned = segments.begin(model.path)
    registering.add("m", pinned)
    lane.attach("m", Decoder(model.config, Weights(pinned.segment, pinned), 256))
    lane.add("r", "m", PROMPT, 3)
    assert isinstance(lane.step(("r", 0, 4)), StepParked)
    assert registering.faults() == []
    case.allow(3)
    case.registrar.gate.release()
    case.pinner.finish()
    reason = f"{model.path.name} cannot be read by the GPU: cudaHostRegister of 4096 bytes"
    [(name, said)] = registering.faults()
    assert name == "m"
    assert said.startswith(reason)
    assert registering.faults() == []
    lane.executor.poll()
    failed = lane.events[-1]
    assert isinstance(failed, StepFailed)
    assert "WeightsLost" in failed.reason
    assert reason in failed.reason
    with pytest.raises(WeightsLost, match="cannot be read"):
        pinned.readable(0)
    with pytest.raises(OSError, match=r"segment.*cudaErrorMemoryAllocation"):
        segments.open(model.path, lent=True)
    assert len(case.registrar.registered) == 3, "steps may still read it"
    segments.close(model.path)
    case.pinner.finish()
    assert not case.registrar.registered


def test_a_step_that_is_parked_when_its_model_is_detached_fails(case: Case, tmp_path: Path) -> None:
    """It would wait for ever, or read memory that is taken back."""
    make_checkpoint(tmp_path, "llama")
    model = LateModel(tmp_path).load_all()
    cold(case)
    segments, lane = case.segments(), Lane()
    lane.attach("m", decoder_of(model, segments))
    lane.add("r", "m", PROMPT, 3)
    assert isinstance(lane.step(("r", 0, 4)), StepParked)
    case.allow(3)
    lane.executor.detach("m")
    segments.close(model.path)
    lane.executor.poll()
    failed = lane.events[-1]
    assert isinstance(failed, StepFailed)
    assert "are here no more" in failed.reason
    case.registrar.gate.release()  # for the piece that was begun
    case.pinner.finish()
    assert not case.registrar.registered


def test_a_file_that_is_gone_is_an_error_at_once(case: Case, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        case.segments().begin(tmp_path / "none")


def test_models_that_are_complete_or_detached_are_not_looked_at_any_more(
    case: Case, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    path = LateModel(tmp_path).path
    segments, registering = case.segments(), Registering()
    pinned = segments.begin(path)
    registering.add("m", pinned)
    pinned.region.wait()
    assert registering.faults() == []
    assert not registering._segments
    registering.add("m", pinned)
    registering.remove("m")
    registering.remove("another")
    assert not registering._segments


class Peers:
    """Stands in for `memory.peer_pool.PeerPool`."""

    def __init__(self, registrar: FakeRegistrar) -> None:
        self._registrar = registrar
        self.models: dict[str, Lendable] = {}

    def add(self, model: str, weights: Lendable) -> None:
        self.models[model] = weights

    def remove(self, model: str) -> None:
        assert self._registrar.registered, "copies end before the registration does"
        del self.models[model]


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen3-tied", True)])
def test_what_gemms_read_of_a_segment_is_offered_to_neighbours_once(
    case: Case, tmp_path: Path, name: str, tied: bool
) -> None:
    """It is copied there when copy engines can read all of it."""
    make_checkpoint(tmp_path, name)
    late = LateModel(tmp_path).load_all()
    assert late.config.tied == tied
    cold(case)
    peers = Peers(case.registrar)
    segments = case.segments(cast(Any, peers))
    segment = segments.begin(late.path).segment
    assert segments.begin(late.path).segment is segment
    (offered,) = peers.models.values()
    assert not offered.complete()
    case.allow(-(-path_bytes(late) // PAGE))
    case.pinner.finish()
    assert offered.complete()
    for tensor, place in segment.tensors.items():
        inside = [a <= place.offset < b for a, b in offered.pieces]
        assert sum(inside) == (tied or tensor != "embed"), tensor
    assert offered.pieces == tuple(sorted(offered.pieces))
    segments.close(late.path)
    assert peers.models
    segments.close(late.path)
    assert not peers.models


def test_users_of_other_processes_hold_a_segment_and_nothing_learns_of_them(
    case: Case, tmp_path: Path
) -> None:
    """Two workers that lend each other their links give a segment back all the same."""
    make_checkpoint(tmp_path, "llama")
    path = LateModel(tmp_path).path
    told: list[str] = []
    watcher = SimpleNamespace(
        opened=lambda path, address, size: told.append(f"opened {Path(path).name} {size}"),
        closed=lambda path: told.append(f"closed {Path(path).name}"),
    )
    segments = case.segments(watcher=watcher)
    first = segments.open(path, lent=True)
    assert case.registrar.bytes == path.stat().st_size, "another process may read all of it"
    assert told == []
    assert segments.open(path) is segments.open(path) is first
    assert told == [f"opened {path.name} {first.data.nbytes}"]
    segments.close(path)
    segments.close(path)
    assert told[1:] == [f"closed {path.name}"]
    case.pinner.finish()
    assert case.registrar.registered, "another process still reads it"
    segments.close(path, lent=True)
    case.pinner.finish()
    assert not case.registrar.registered
    assert len(told) == 2
