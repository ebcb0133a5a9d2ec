"""A process that lends its link, on the emulated driver.

It sends a word when it relays, and after each word it is told. `hold` lets its GPU stand still,
`go` lets it go on, `stream` and `rest` are what its steps do, and `end` ends it.
"""

import ctypes
import mmap
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from fake_cuda import FakeCuda

from c2cserve.transfer.gpus import open_on, serve_on
from c2cserve.transfer.moves import ports_of
from c2cserve.transfer.relay_channel import GpuMemory
from c2cserve.transfer.relay_host import RelayHost
from c2cserve.transfer.settings import Settings

PUMP_S = 1e-3


class Files:
    """Memory of other processes, as files."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[mmap.mmap, object]] = {}

    def open_segment(self, path: str) -> int:
        if path.endswith("missing"):
            raise FileNotFoundError(path)
        return self._map(path)

    def close_segment(self, path: str) -> None:
        pass

    def open_gpu(self, memory: GpuMemory) -> int:
        return self._map(memory.handle.decode()) + memory.offset

    def close_gpu(self, address: int) -> None:
        pass

    def _map(self, path: str) -> int:
        with Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.addressof(view)
        self._maps[address] = (memory, view)
        return address


def main(name: str, library: str, told: "Connection[str, str]") -> None:
    cuda = FakeCuda(Path(library))
    ports, relays = ports_of([1], [])
    engine = open_on(ports, relays, [2] * len(ports), b"code", Settings(), driver=library)
    held = threading.Event()

    def pump() -> None:
        while True:
            if not held.is_set():
                cuda.pump()
            time.sleep(PUMP_S)

    threading.Thread(target=pump, daemon=True).start()
    host = RelayHost(name, lambda channel: serve_on(engine, 2, channel, driver=library), Files())
    word = "up"
    while word != "end":
        told.send(word)
        match word := told.recv():
            case "hold":
                held.set()
            case "go":
                held.clear()
            case "stream" | "rest":
                host.set_streaming(word == "stream")
            case _:
                pass
    host.close()
    engine.close()
