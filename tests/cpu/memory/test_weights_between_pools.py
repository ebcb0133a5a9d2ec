"""Weights from one pool into another over TCP; what does not come is read from the files."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import Model, layered, write_file
from readers import eventually

from c2cserve.cluster import weights
from c2cserve.cluster.messages import Source
from c2cserve.cluster.weights import FetchError, Outgoing, WeightsPort, fetch, source_of
from c2cserve.kernels.crc32 import crc32
from c2cserve.memory.arrivals import Arrivals, weights_range
from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.loader import Read, pread
from c2cserve.memory.pool import Listener, Pool
from c2cserve.memory.segment import Segment, State

HOLDER, RECEIVER, PRINT = b"holder" * 6, b"receiver" * 4, b"fingerprint"


class Pools:
    """A pool that has a model and sends it, and one without."""

    def __init__(self, directory: Path, disk: Path) -> None:
        self.disk = disk
        self.model: Model = layered(6, (500, 300))
        write_file(disk / "model.safetensors", self.model.stored)
        self.events: list[tuple[str, str]] = []
        self.errors: list[str] = []
        self.reads = 0
        self.holder = self._pool(directory, "holder", pread)
        self.receiver = self._pool(directory, "receiver", self._read)
        self.holder.load("m#1", self.model.plan, open_checkpoint(disk, self.model.plan))
        eventually(lambda: self.holder.whole("m#1") is not None)
        self.port = WeightsPort("127.0.0.1", HOLDER, self._find, crc32)

    def _pool(self, directory: Path, name: str, read: Read) -> Pool:
        listener = Listener(
            usable=lambda _: self.events.append((name, "usable")),
            loaded=lambda *_: self.events.append((name, "loaded")),
            failed=lambda _, why: self.events.append((name, why)),
        )
        return Pool(name, directory, 1 << 30, listener, threads=2, read=read)

    def _read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.reads += 1
        return pread(fd, buffer, offset)

    def _find(self, model: str, fingerprint: bytes) -> Outgoing | None:
        segment = self.holder.whole("m#1")
        if segment is None or (model, fingerprint) != ("m", PRINT):
            return None
        return Outgoing(segment.data.data, *weights_range(segment))

    def source(self, port: int | None = None, secret: bytes = HOLDER) -> Source:
        return source_of(
            "127.0.0.1", port or self.port.port, "m", holder_secret=secret,
            receiver_secret=RECEIVER,
        )  # fmt: skip

    def transfer(self, source: Source, fingerprint: bytes = PRINT) -> Segment:
        """Load the model into the receiver's pool. Return its segment."""

        def get(arrivals: Arrivals) -> bool:
            try:
                fetch(source, RECEIVER, fingerprint, arrivals, crc32)
            except FetchError as error:
                self.errors.append(str(error))
                return False
            return True

        plan = self.model.plan
        self.receiver.load("m#7", plan, open_checkpoint(self.disk, plan), fetch=get)
        eventually(lambda: ("receiver", "loaded") in self.events)
        return Segment.open(self.receiver.path("m#7"))

    def check(self, segment: Segment) -> None:
        assert segment.state is State.READY
        assert [event for name, event in self.events if name == "receiver"] == ["usable", "loaded"]
        assert segment.loaded_bytes == self.model.plan.bytes
        for number in range(6):
            assert segment.ready(number)
            name = f"layers.{number}"
            assert segment.raw(name).tobytes() == self.model.expected(name)

    def close(self) -> None:
        self.port.close()
        self.holder.close()
        self.receiver.close()


@pytest.fixture
def pools(pool_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pools]:
    monkeypatch.setattr(weights, "CHUNK_BYTES", 100_000)  # so that there are several
    pools = Pools(pool_dir, tmp_path)
    yield pools
    pools.close()


def test_weights_come_from_the_other_pool_and_no_file_is_read(pools: Pools) -> None:
    pools.check(pools.transfer(pools.source()))
    assert pools.reads == 0
    assert not pools.errors


def test_without_the_secret_no_weights_are_sent(pools: Pools) -> None:
    pools.check(pools.transfer(pools.source(secret=b"another" * 5)))
    assert len(pools.errors) == 1
    assert pools.reads > 0


def test_a_key_is_for_one_model(pools: Pools) -> None:
    source = pools.source()
    source.model = "other"
    pools.check(pools.transfer(source))
    assert "the connection" in pools.errors[0] or "reset" in pools.errors[0]


def test_other_weights_are_not_taken(pools: Pools) -> None:
    pools.check(pools.transfer(pools.source(), b"of other files"))
    assert "does not have" in pools.errors[0]


def test_a_holder_that_is_gone_is_no_fault(pools: Pools) -> None:
    pools.port.close()
    pools.check(pools.transfer(pools.source()))
    assert pools.errors


def test_damaged_bytes_are_noticed_and_the_rest_is_read_from_the_files(pools: Pools) -> None:
    """A proxy turns a bit in the middle of the weights."""
    with Damage(pools.port.port, after=1_000_000) as damage:
        pools.check(pools.transfer(pools.source(damage.port)))
    assert "damaged" in pools.errors[0]
    assert pools.reads > 0


def test_a_connection_that_breaks_in_the_middle(pools: Pools) -> None:
    with Damage(pools.port.port, after=1_000_000, cut=True) as damage:
        pools.check(pools.transfer(pools.source(damage.port)))
    assert pools.errors


class Damage:
    """A proxy that turns a bit of what comes back, or ends the connection there."""

    def __init__(self, port: int, after: int, *, cut: bool = False) -> None:
        self._to = port
        self._after = after
        self._cut = cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> "Damage":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(weights.STREAMS):
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, damage: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                due = damage and passed <= self._after < passed + len(data)
                if due and self._cut:
                    break
                if due:
                    index = self._after - passed
                    data = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
                passed += len(data)
                target.sendall(data)
        except OSError:
            pass
        source.close()
        target.close()
