"""Weights between two pools against one TCP connection with the same bytes; JSON on stdout.

python benchmarks/cluster_weights.py [--gbit N] [--mib N] [--runs N] [--out FILE]

Two processes on this machine. Three ways by turns:

fetched      the holder's segment into the receiver's pool, with sums, as nodes do it
plain        the same segment over one connection, written to a file in shared memory, without sums
discarded    bytes of a small buffer over one connection, which are thrown away

`plain` touches the same memory as `fetched`; `discarded` stays in the processors' caches. The
processor time of both ends is measured, too. `--gbit` paces what is sent as a network card of that
speed would. Without it, all are bound by the cores that they share.
"""

import argparse
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import psutil
from pool_load import make_plan, write_checkpoint
from report import report

from c2cserve.cluster.weights import STREAMS, Outgoing, WeightsPort, fetch, source_of
from c2cserve.kernels.crc32 import crc32
from c2cserve.memory.arrivals import Arrivals, weights_range
from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.loader import Loader
from c2cserve.memory.segment import Segment

_SECRET = b"a secret of this benchmark"
_BUFFER_BYTES = 1 << 20
_WHOLE, _SMALL = b"w", b"s"
_SO_MAX_PACING_RATE = 47
"""Linux's option, which Python's module lacks. A listener's connections inherit it."""


class _NoAnswer(Exception):
    """The other process has ended."""


def _segment(folder: Path, name: str, mib: int) -> tuple[Segment, Loader]:
    plan = make_plan(mib << 20, "bfloat16")
    file = folder / "model.safetensors"
    if not file.exists():
        write_checkpoint(file, plan)
    sources = open_checkpoint(folder, plan)
    segment = Segment.create(folder / name, plan, sources)
    return segment, Loader(segment, plan, sources)


def _pace(listener: socket.socket, gbit: float | None, streams: int) -> None:
    if gbit is not None:
        rate = int(gbit * 1e9 / 8 / streams)
        listener.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


def _holder(folder: Path, mib: int, gbit: float | None, said: Connection) -> None:
    """Offer a segment, and answer each connection to a second port with as many plain bytes."""
    segment, loader = _segment(folder, "holder", mib)
    loader.run()
    begin, end = weights_range(segment)
    found = Outgoing(segment.data.data, begin, end)
    port = WeightsPort("127.0.0.1", _SECRET, lambda *_: found, crc32)
    plain = socket.create_server(("127.0.0.1", 0))
    _pace(plain, gbit, 1)
    _pace(port._listener, gbit, STREAMS)
    said.send((port.port, plain.getsockname()[1], end - begin))
    small = memoryview(bytes(_BUFFER_BYTES))
    while True:
        connection, _ = plain.accept()
        with connection:
            whole = connection.recv(1) == _WHOLE
            for at in range(begin, end, _BUFFER_BYTES):
                size = min(_BUFFER_BYTES, end - at)
                connection.sendall(found.data[at : at + size] if whole else small[:size])


_Took = tuple[float, float]
"""Seconds of the clock, and of a core."""


def _times_s() -> _Took:
    return time.perf_counter(), time.process_time()


def _since(began: _Took) -> _Took:
    now = _times_s()
    return now[0] - began[0], now[1] - began[1]


def _plain_s(folder: Path, port: int, size: int, *, whole: bool) -> _Took:
    """`whole`: send the segment and write it to a file of reserved pages, as a pool's are."""
    path, buffer, total = folder / "plain", memoryview(bytearray(_BUFFER_BYTES)), 0
    with path.open("wb") as file:
        if whole:
            os.posix_fallocate(file.fileno(), 0, size)
        began = _times_s()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(_WHOLE if whole else _SMALL)
            while count := connection.recv_into(buffer):
                if whole:
                    os.pwrite(file.fileno(), buffer[:count], total)
                total += count
        took = _since(began)
    path.unlink()
    assert total == size
    return took


def _fetch_s(folder: Path, port: int, mib: int) -> _Took:
    segment, _ = _segment(folder, "receiver", mib)
    arrivals = Arrivals(segment, make_plan(mib << 20, "bfloat16"), lambda _: None)
    source = source_of("127.0.0.1", port, "m", holder_secret=_SECRET, receiver_secret=_SECRET)
    began = _times_s()
    fetch(source, _SECRET, b"", arrivals, crc32)
    took = _since(began)
    arrivals.finish()
    for path in folder.glob("receiver*"):
        path.unlink()
    return took


@dataclass
class _Way:
    """Runs of one way: seconds of the clock, and of a core at each end."""

    run: Callable[[], _Took]
    gb: float
    took_s: list[float] = field(default_factory=list[float])
    sent_s: list[float] = field(default_factory=list[float])
    received_s: list[float] = field(default_factory=list[float])

    def measure(self, holder: psutil.Process) -> None:
        before_s = _cpu_s(holder)
        took_s, received_s = self.run()
        self.took_s.append(took_s)
        self.received_s.append(received_s)
        self.sent_s.append(_cpu_s(holder) - before_s)

    def found(self) -> dict[str, float]:
        return {
            "gb_per_s": self.gb / median(self.took_s),
            "sender_cpu_s_per_gb": median(self.sent_s) / self.gb,
            "receiver_cpu_s_per_gb": median(self.received_s) / self.gb,
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _ratios(fetched: _Way, plain: _Way) -> dict[str, float | list[float]]:
    """`cpu_p50`: by the processor time of both ends."""
    ratios = [b / a for a, b in zip(fetched.took_s, plain.took_s, strict=True)]
    cpu = [
        (plain.sent_s[i] + plain.received_s[i]) / (fetched.sent_s[i] + fetched.received_s[i])
        for i in range(len(ratios))
    ]
    return {"p50": median(ratios), "cpu_p50": median(cpu), "each": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbit", type=float, help="the network's speed")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    mine, its = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        process = multiprocessing.Process(
            target=_holder, args=(folder, args.mib, args.gbit, its), daemon=True
        )
        process.start()
        if not mine.poll(120):
            raise _NoAnswer
        weights_port, plain_port, size = mine.recv()
        ways = {
            "fetched": _Way(lambda: _fetch_s(folder, weights_port, args.mib), size / 1e9),
            "plain": _Way(lambda: _plain_s(folder, plain_port, size, whole=True), size / 1e9),
            "discarded": _Way(lambda: _plain_s(folder, plain_port, size, whole=False), size / 1e9),
        }
        holder = psutil.Process(process.pid)
        for _ in range(args.runs):
            for way in ways.values():
                way.measure(holder)
        process.terminate()
        process.join()
    found: dict[str, object] = {name: way.found() for name, way in ways.items()}
    for name in ("plain", "discarded"):
        found[f"ratio_to_{name}"] = _ratios(ways["fetched"], ways[name])
    report(found, args.out, gbit=args.gbit, mib=args.mib, runs=args.runs)


if __name__ == "__main__":
    main()
