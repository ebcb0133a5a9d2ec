"""Weights between two pools against one TCP connection with the same bytes; JSON on stdout.

python benchmarks/cluster_weights.py [--gbit N] [--mib N] [--runs N] [--out FILE]

Two processes on this machine. Pairs of runs by turns: the holder's segment into the receiver's pool
with sums, and bytes of a small buffer sent over one connection and thrown away. `--gbit` paces what
is sent as a network card of that speed would. Without it, both are bound by the cores that they
share, and the ratio is what sums and writing cost beside the kernel's copies.
"""

import argparse
import multiprocessing
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from pool_load import make_plan, write_checkpoint
from report import report

from c2cserve.cluster.weights import STREAMS, Outgoing, WeightsPort, fetch, source_of
from c2cserve.memory.arrivals import Arrivals, weights_range
from c2cserve.memory.checkpoint import open_checkpoint
from c2cserve.memory.loader import Loader
from c2cserve.memory.segment import Segment

_SECRET = b"a secret of this benchmark"
_BUFFER_BYTES = 1 << 20
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
    port = WeightsPort("127.0.0.1", _SECRET, lambda *_: found)
    plain = socket.create_server(("127.0.0.1", 0))
    _pace(plain, gbit, 1)
    _pace(port._listener, gbit, STREAMS)
    said.send((port.port, plain.getsockname()[1]))
    data = bytes(_BUFFER_BYTES)
    while True:
        connection, _ = plain.accept()
        with connection:
            for _ in range((end - begin) // len(data)):
                connection.sendall(data)


def _plain_s(port: int) -> tuple[float, int]:
    buffer, total = bytearray(_BUFFER_BYTES), 0
    began_s = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while count := connection.recv_into(buffer):
            total += count
    return time.perf_counter() - began_s, total


def _fetch_s(folder: Path, port: int, mib: int) -> tuple[float, int]:
    segment, _ = _segment(folder, "receiver", mib)
    arrivals = Arrivals(segment, make_plan(mib << 20, "bfloat16"), lambda _: None)
    source = source_of("127.0.0.1", port, "m", holder_secret=_SECRET, receiver_secret=_SECRET)
    began_s = time.perf_counter()
    fetch(source, _SECRET, b"", arrivals)
    took_s = time.perf_counter() - began_s
    arrivals.finish()
    for path in folder.glob("receiver*"):
        path.unlink()
    return took_s, arrivals.end - arrivals.begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbit", type=float, help="the network's speed")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    mine, its = multiprocessing.Pipe()
    plain, fetched = list[float](), list[float]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        process = multiprocessing.Process(
            target=_holder, args=(folder, args.mib, args.gbit, its), daemon=True
        )
        process.start()
        if not mine.poll(120):
            raise _NoAnswer
        weights_port, plain_port = mine.recv()
        for _ in range(args.runs):
            for times, (took_s, size) in (
                (plain, _plain_s(plain_port)),
                (fetched, _fetch_s(folder, weights_port, args.mib)),
            ):
                times.append(size / took_s / 1e9)
        process.terminate()
        process.join()
    ratios = [a / b for a, b in zip(fetched, plain, strict=True)]
    found = {
        "plain_gb_per_s": median(plain), "fetched_gb_per_s": median(fetched),
        "ratio_p50": median(ratios), "ratios": ratios,
    }  # fmt: skip
    report(found, args.out, gbit=args.gbit, mib=args.mib, runs=args.runs)


if __name__ == "__main__":
    main()
