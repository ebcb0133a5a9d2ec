"""A process that owns GPU 1 and lends its link: `relay_worker.py NAME [compute | decode SHAPE]`.

It writes a line when it relays. With `compute`, GPU 1 multiplies matrices meanwhile, and the
process writes how many products a second it does. With `decode`, a model of that shape with random
weights decodes there, and a line has when some steps began and ended, and their median, in seconds.
The end of its standard input ends it.
"""

import sys
import threading
import time
from pathlib import Path
from statistics import median

import torch

from c2cserve.engine.gpu.segments import PinnedSegments
from c2cserve.memory.pinning import PinnedRegion, pin_array
from c2cserve.serving.worker.gpu_relays import NeighbourMemory
from c2cserve.transfer.gpus import engine_of, serve_relays
from c2cserve.transfer.relay_host import RelayHost

DEVICE = 1
_KV_BYTES = 4 << 30
_ROWS, _PROMPT = 8, 512
_WARM_STEPS, _STEPS, _ROUNDS = 8, 16, 8


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
        work = {"compute": compute, "decode": decode}[options[0]]
        threading.Thread(target=work, args=(ended, *options[1:]), daemon=True).start()
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
