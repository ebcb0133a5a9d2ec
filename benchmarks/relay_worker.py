"""A process that owns GPU 1 and lends its link.

relay_worker.py NAME [compute | copies MIB | decode SHAPE]

It writes a line when it relays. With `compute`, GPU 1 multiplies matrices meanwhile, and the
process writes how many products a second it does. With `copies`, it copies so much from host memory
every now and then. With `decode`, a model of that shape with random weights decodes there. A line
has when some copies or steps began and ended, and their median, in seconds. The end of its standard
input ends it.
"""

import sys
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.memory.pinning import PinnedRegion, pin_array
from c2cserve.serving.worker.gpu_relays import NeighbourMemory
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.gpus import engine_of, serve_relays
from c2cserve.transfer.moves import HOST, Segment
from c2cserve.transfer.relay_host import RelayHost

DEVICE = 1
_KV_BYTES = 4 << 30
_ROWS, _PROMPT = 8, 512
_WARM_STEPS, _STEPS, _ROUNDS = 8, 16, 8
_COPIES, _BETWEEN_S = 4, 0.02


class Files(NeighbourMemory):
    """Plain files in the place of segments."""

    def __init__(self, device: int, segments: PinnedSegments) -> None:
        super().__init__(device, segments)
        self._open: list[tuple[torch.Tensor, PinnedRegion]] = []

    def open_segment(self, path: str) -> int:
        size = Path(path).stat().st_size
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self._open.append((memory, pin_array(memory.numpy())))
        return memory.data_ptr()

    def close_segment(self, path: str) -> None:
        pass


def main(name: str, *options: str) -> None:
    torch.cuda.set_device(DEVICE)
    engine = engine_of((DEVICE,))
    RelayHost(
        f"{name}.1", lambda channel: serve_relays(engine, DEVICE, channel),
        Files(DEVICE, PinnedSegments()),
    )  # fmt: skip
    sys.stdout.write("up\n")
    sys.stdout.flush()
    ended = threading.Event()
    if options:
        work = {"compute": compute, "copies": partial(copies, engine), "decode": decode}
        arguments = (ended, *options[1:])
        threading.Thread(target=work[options[0]], args=arguments, daemon=True).start()
    sys.stdin.read()
    ended.set()
    time.sleep(0.1)


def compute(ended: threading.Event) -> None:
    torch.cuda.set_device(DEVICE)
    x = torch.ones((4096, 4096), dtype=torch.bfloat16, device="cuda")
    while not ended.is_set():
        begun_s = time.monotonic()
        for _ in range(200):
            torch.mm(x, x)
        torch.cuda.synchronize()
        sys.stdout.write(f"{200 / (time.monotonic() - begun_s):.0f}\n")
        sys.stdout.flush()


def copies(engine: TransferEngine, ended: threading.Event, mib: str) -> None:
    size = int(mib) << 20
    host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    gpu = torch.empty(size, dtype=torch.uint8, device=f"cuda:{DEVICE}")
    segment = Segment(gpu.data_ptr(), host.data_ptr(), size, DEVICE, HOST)
    while not ended.is_set():
        round_s, times = time.monotonic(), list[float]()
        for _ in range(_COPIES):
            begun_s = time.perf_counter()
            engine.wait(engine.submit([segment]))
            times.append(time.perf_counter() - begun_s)
            time.sleep(_BETWEEN_S)
        sys.stdout.write(f"{round_s} {time.monotonic()} {median(times)}\n")
        sys.stdout.flush()


def decode(ended: threading.Event, shape: str) -> None:
    from gpu_engine_parts import buffer_bytes
    from gpu_engine_run import Engine
    from gpu_machine import Gpu
    from gpu_models import config_of

    torch.set_grad_enabled(False)
    config, machine = config_of(shape), Gpu(_KV_BYTES, "assumed", device=DEVICE)
    machine.warm(config)
    engine = Engine(machine, machine.linear()[0])
    engine.attach("a", config, machine.buffer("hbm", buffer_bytes(config)))
    while not ended.is_set():
        talks = engine.talk("a", _PROMPT, _ROWS)
        engine.step(talks)
        engine.decode(talks, _WARM_STEPS)
        for _ in range(_ROUNDS):  # contexts grow little, so that rounds can be compared
            begun_s = time.monotonic()
            times = engine.decode(talks, _STEPS)
            sys.stdout.write(f"{begun_s} {time.monotonic()} {median(times)}\n")
            sys.stdout.flush()
        engine.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
