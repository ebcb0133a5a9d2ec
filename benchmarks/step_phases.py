"""Steps that the cost model misses: decodes by context, and prompts one by one and in a row.

python benchmarks/step_phases.py [--shapes llama-8b,llama-3b] [--steps N] [--rates measured|assumed]
    [--out FILE]

All weights are in HBM. A live step of 32 requests with 1,040 tokens takes longer than
`cost_model.py` says, and no result says whether the engine's does. Prompts in a row take longer
than the GPU's time for one of them, though the host launches them in less. So this measures:

    decodes    16, 32 and 64 sequences with 32, 600 and 1,040 tokens: from step to step, on the GPU,
               and as live ones are measured: the second half of 32 steps that follow on the prompts
    prompts    2,048 and 4,096 tokens: on the GPU after a pause, from step to step in a row, by the
               host, and each with our own attention too, where FlashInfer's is installed

While steps follow each other, the GPU's clock and power are read every 20 ms (`clock_mhz`: the
median; `watts`: the most). A clock that falls says that power is the bound. It takes less than a
minute on an H200.
"""

import argparse
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_models import SHAPES
from report import report
from step_launch import Bench, Machine, open_gpu

from c2cserve.devices.gpus import find_nvml

CONTEXTS = (32, 600, 1040)
DECODES = (16, 32, 64)
PROMPTS = (2048, 4096)
_KV_BYTES = 28 << 30
_AFTER_PROMPTS = 32
"""Steps that follow on prompts. A live server's decodes are measured in the second half of them."""
_EVERY_S = 0.02

Reading = tuple[float, float]
"""MHz of the multiprocessors, watts of the GPU."""
Read = Callable[[], Reading | None]


class Phases(Bench):
    """One model, with its steps by context."""

    def decodes(self, count: int, context: int, read: Read) -> dict[str, Any]:
        """Return the times of a step of so many sequences, which begin with `context` tokens."""
        row = self._row(self._talks(count, context), 0, read)
        soon_s = self._after_prompts_s(count, context)
        return row | {"after_prompts_s": soon_s, "decodes": count, "context": context}

    def prompt(self, tokens: int, read: Read) -> dict[str, Any]:
        return self._row([], tokens, read) | {"prompt_tokens": tokens}

    def _after_prompts_s(self, count: int, context: int) -> float:
        """Return the seconds of a step, soon after prompts that kept the GPU busy. Its graph was
        captured before."""
        talks = self._talks(count, context)
        times = self._engine.steps([talks] * _AFTER_PROMPTS)
        self._engine.end()
        return median(times[len(times) // 2 :])

    def _row(self, talks: Sequence[str], tokens: int, read: Read) -> dict[str, Any]:
        host_s = median(self._host_s(talks, tokens) for _ in range(self._steps))
        gpu_s = median(self._gpu_s(talks, tokens, 2 * host_s) for _ in range(self._steps))
        with _sampled(read) as readings:
            wall_s, _ = self._wall_s(talks, tokens)
        self._engine.end()
        return {"wall_s": wall_s, "host_s": host_s, "gpu_s": gpu_s} | {
            "clock_mhz": median(mhz for mhz, _ in readings) if readings else None,
            "watts": max(watts for _, watts in readings) if readings else None,
        }


@contextmanager
def _sampled(read: Read) -> Generator[list[Reading]]:
    """Yield a list that fills with readings until the block is left."""
    found: list[Reading] = []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(_EVERY_S):
            if (reading := read()) is not None:
                found.append(reading)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def reader(nvml: Any = None) -> Read:
    """Return how the first GPU's clock and power are read. Without NVML there are none."""
    nvml = nvml or find_nvml()
    if nvml is None:
        return lambda: None
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)

    def read() -> Reading | None:
        mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
        return float(mhz), nvml.nvmlDeviceGetPowerUsage(handle) / 1e3

    return read


def measure(machine: Machine, given: argparse.Namespace, read: Read) -> list[dict[str, Any]]:
    """Time every kind of step; print and return a row for each, written to `given.out` too."""
    began_s = time.monotonic()
    flash, rows = machine.flash, list[dict[str, Any]]()
    for shape in given.shapes.split(","):
        for attention in ("flash", "own") if flash is not None else ("own",):
            machine.flash = flash if attention == "flash" else None
            bench = Phases(machine, argparse.Namespace(**{**vars(given), "shape": shape}))
            found = [bench.prompt(tokens, read) for tokens in PROMPTS]
            if not rows or rows[-1]["shape"] != shape:  # no decode has FlashInfer's attention
                found += [bench.decodes(n, context, read) for context in CONTEXTS for n in DECODES]
            for row in found:
                rows.append({"shape": shape, "attention": attention, **row})
                print(_line(rows[-1]), flush=True)
    machine.flash = flash
    seconds = time.monotonic() - began_s
    print(f"{seconds:.0f} s")
    results = {
        "gpu": machine.name, "torch": torch.__version__, "picked_by": machine.picked_by,
        "steps": rows, "seconds": seconds,
    }  # fmt: skip
    report(results, given.out, show=False, shapes=given.shapes, steps=given.steps)
    return rows


def _line(row: dict[str, Any]) -> str:
    what = (
        f"prompt of {row['prompt_tokens']}, {row['attention']} attention"
        if "prompt_tokens" in row
        else f"{row['decodes']} decodes at {row['context']}"
    )
    names = ["gpu_s", "wall_s", "host_s", *(["after_prompts_s"] if "decodes" in row else [])]
    times = "".join(f" {name[:-2]} {1e3 * row[name]:.2f}" for name in names)
    power = "" if row["watts"] is None else f" {row['clock_mhz']:.0f} MHz, {row['watts']:.0f} W"
    return f"{row['shape']:<10}{what:<36}{times} ms{power}"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="llama-8b,llama-3b", help=", ".join(SHAPES))
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a kind")
    parser.add_argument("--rates", choices=("measured", "assumed"), help="of GEMMs")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.set_defaults(layers=None, kept=False)
    return parser.parse_args(given)


def main() -> None:
    given = arguments()
    measure(open_gpu("step_phases", _KV_BYTES, given.rates), given, reader())


if __name__ == "__main__":
    main()
