"""Slices of one GPU that decode at once, each a model of its own that streams: shares of the link.

python benchmarks/gpu_contention.py [--slices 1,2,4,7] [--sms 16] [--shape llama-3b] [--layers 4]
    [--homes peer,host] [--seconds S] [--out FILE]

Every slice is a partition of SMs with its own thread, as in a worker, and decodes one sequence at
batch 1, whose step reads all of the model's weights over the link. Bytes a second of each slice
while all are at work, against one slice alone in the same run.
"""

import argparse
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gemm_summary import FAIR_SHARE_BAR, seconds_at_once
from gpu_engine_parts import PROMPT
from gpu_engine_run import Engine
from gpu_models import config_of
from report import report

from c2cserve.core.tensors import Home
from c2cserve.devices.partitions import Partition, split_sms
from c2cserve.engine.gpu.setup import GpuParts, open_gpu
from c2cserve.engine.models.layout import plan_layout
from c2cserve.kernels.gpu.gemm.linear import Linear
from c2cserve.memory.hbm_cache import HbmCache

_SUM_BAR = 0.95
"""Of what one slice alone moves."""
_KV_BYTES = 512 << 20
_ALIGNMENT = 2 << 20
_PAUSE_S = 1e-4
_WARM = 4


class _Lane:
    """`gpu_engine_run.Machine` of one partition."""

    def __init__(self, parts: GpuParts, sampler: Any) -> None:
        self.device, self.arena, self.staging = parts.device, parts.arena, parts.place
        self.host_sampler, self.linear, self._parts = sampler, parts.linear, parts
        self.flash = parts.flashinfer.flash

    def synchronize(self) -> None:
        self._parts.finish()

    def mark(self) -> Any: ...

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return 0.0

    def capture_decoding(self, ops: Any, linear: Linear, cache: HbmCache | None) -> None:
        ops.capture_decoding(linear.launched, cache)


class Contention:
    def __init__(self, machine: Any, given: argparse.Namespace) -> None:
        """`machine`: `gpu_machine.Gpu`, for buffers and limits."""
        self._machine, self._given = machine, given
        self._config = config_of(given.shape, given.layers)
        self._bytes = plan_layout(self._config).bytes
        self._partitions = split_sms(0, given.sms, max(given.slices))
        self._size = (len(self._partitions) + 1) * (self._bytes // _ALIGNMENT + 8) * _ALIGNMENT

    def run(self, home: Home) -> list[dict[str, Any]]:
        buffer = self._machine.buffer(home, self._size)
        rows: list[dict[str, Any]] = []
        for count in self._given.slices:
            speeds = self._at_once(buffer, count)
            alone = rows[0]["bytes_per_s"][0] if rows else speeds[0]
            mean = sum(speeds) / count
            worst = max((speed / mean - 1 for speed in speeds), key=abs)
            row = {
                "home": home, "slices": count, "sms": self._given.sms, "bytes_per_s": speeds,
                "sum_over_alone": sum(speeds) / alone, "worst_off": worst,
                "met": sum(speeds) >= _SUM_BAR * alone and abs(worst) <= FAIR_SHARE_BAR,
            }  # fmt: skip
            rows.append(row)
            shown = " ".join(f"{speed / 1e9:.1f}" for speed in speeds)
            print(f"{count} slices from {home}: {shown} GB/s, {row['sum_over_alone']:.3f} of one"
                  f" alone, shares within {abs(worst):.1%}", flush=True)  # fmt: skip
        return rows

    def _at_once(self, buffer: torch.Tensor, count: int) -> list[float]:
        """Bytes per second of each of `count` slices while all decode."""
        start, faults = threading.Barrier(count), list[BaseException]()
        ends: list[list[float]] = [[] for _ in range(count)]
        read = [0.0] * count

        def work(place: int, partition: Partition) -> None:
            try:
                with torch.no_grad():
                    engine = self._engine(buffer, place, partition, count)
                    [talk] = engine.talk("m", PROMPT)
                    engine.step([talk])
                    graphs, engine.ops.graphs = engine.ops.graphs, None
                    engine.watch.begin_count()
                    engine.step([talk])
                    read[place] = engine.watch.end_count().bytes
                    engine.ops.graphs = graphs
                    engine.decode([talk], _WARM)
                    start.wait(60)
                    begin_s = now_s = time.perf_counter()
                    while now_s - begin_s < self._given.seconds:
                        for taken_s in engine.decode([talk], 8):
                            now_s += taken_s
                            ends[place].append(now_s - begin_s)
                        now_s = time.perf_counter()
                        ends[place].append(now_s - begin_s)  # the last one of them
            except BaseException as fault:
                faults.append(fault)
                start.abort()
                raise

        threads = [
            threading.Thread(target=work, args=(place, self._partitions[place]))
            for place in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise RuntimeError(f"a slice failed: {faults[0]}")
        return [size / s for size, s in zip(read, seconds_at_once(ends), strict=True)]

    def _engine(self, buffer: torch.Tensor, place: int, partition: Partition, count: int) -> Engine:
        sampler = self._machine.host_sampler
        parts = open_gpu(0, _KV_BYTES, sampler, partition=partition, profile=self._machine.choice)
        parts.warm(self._config)
        parts.linear.neighbours = count - 1
        engine = Engine(_Lane(parts, sampler), parts.linear, pause_s=_PAUSE_S)
        offset = place * (self._bytes // _ALIGNMENT + 8) * _ALIGNMENT
        engine.attach("m", self._config, buffer, offset)
        return engine


def main() -> None:
    given = _arguments()
    from gpu_machine import SETUP_ERRORS, Gpu  # needs CUDA's bindings

    try:
        machine = Gpu(_KV_BYTES)
    except SETUP_ERRORS as error:
        raise SystemExit(f"gpu_contention: {error}") from error
    homes: Sequence[Home] = given.homes.split(",") if given.homes else machine.homes
    bench = Contention(machine, given)
    rows = [row for home in homes for row in bench.run(home)]
    results = {"gpu": machine.name, "picked_by": machine.picked_by, "rows": rows}
    shown = {name: str(value) for name, value in vars(given).items()}
    report(results, given.out, show=False, arguments=shown)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", default="1,2,4,7", help="at once, one number after another")
    parser.add_argument("--sms", type=int, default=16)
    parser.add_argument("--shape", default="llama-3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--homes", help="peer, host or both; default: what the machine has")
    parser.add_argument("--seconds", type=float, default=1.5, help="of every number of slices")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args()
    given.slices = [int(count) for count in given.slices.split(",")]
    return given


if __name__ == "__main__":
    main()
