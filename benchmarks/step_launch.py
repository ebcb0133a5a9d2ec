"""What steps of a resident model cost: wall, host and GPU time, with and without prompts.

python benchmarks/step_launch.py [--shape llama-8b] [--layers N] [--rates measured|assumed]
    [--kept] [--warm] [--steps N] [--profile] [--out FILE]

All weights are in HBM; each sequence has a context of some 600 tokens. Of each kind of step:

  wall   from step to step, the next one launched while this one runs, as a slice does it
  host   the slice's thread, from taking a step to having launched all of it, on an idle GPU
  gpu    the GPU's own time, all of the step launched before its first kernel begins
  none   launched one by one instead of as graphs (`wall`, for comparison)
  slow   the slowest step of those that `wall` is of: a graph is captured in one of the first

A step is bound by the host where `host` is larger than `gpu`. Those are prompts of one length. Two
measurements of `host` come before them:

  lengths   prompts of lengths that no prompt had before, then of the same lengths again
  live      prompts of random lengths, each with some decode steps, then a pause as between requests

A length is rounded up (`kernels.gpu.gemm.long_rows`), so some lengths only look new. With --warm
all usual ones are run before, as a server does it while it has time; what that takes is shown. With
--kept weights have their home in host memory and are kept by the weight cache, as in serving.
--profile shows where the host's time goes in a mixed step. Without a profile of this machine (or
with --rates assumed) GEMM kernels are picked by an H200's known rates, which works on any Hopper
GPU.
"""

import argparse
import cProfile
import pstats
import random
import time
from collections.abc import Sequence
from math import log
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import torch
from gpu_engine_parts import buffer_bytes
from gpu_engine_run import Engine
from gpu_engine_run import Machine as EngineMachine
from gpu_models import SHAPES, config_of
from report import report

CONTEXT = 600
DECODES = (1, 32, 64, 96, 128, 256)
MIXED = ((31, 512), (127, 512), (255, 512))
"""Sequences that decode, and the new tokens of one prompt beside them."""
PROMPTS = (512, 2048)
NEW_LENGTHS = tuple(range(71, 1024, 37))
"""Prompts of more rows than our own GEMMs take."""
LIVE_PROMPTS = 60
_LIVE_MEDIAN, _LIVE_SPREAD, _LIVE_MOST = 512, 0.6, 2048
"""Tokens of a live prompt: lognormal, up to a most."""
_LIVE_DECODES = 8
_LIVE_PAUSE_S = 0.03
_FIRST_PROMPT = 2100
"""Tokens of the prompt that loads what any prompt needs. Its rows are those of no other one."""
_KV_BYTES = 28 << 30
_PREFILL_TOKENS = 4800
"""Tokens of prompts that are computed at a time."""
_WARM = 6
"""Steps before those that count: kernels load, graphs are captured."""
_TOP = 25


class Machine(EngineMachine, Protocol):
    """`gpu_machine.Gpu`, and in tests a machine without one."""

    name: str
    picked_by: str

    def warm(self, config: Any) -> None: ...

    def warm_gemms(self) -> tuple[int, float]:
        """Run GEMMs of usual prompts once. Return how many, and the seconds of the host."""
        ...

    def buffer(self, home: Any, size: int) -> torch.Tensor: ...

    def linear(self, kept_bytes: int = 0) -> tuple[Any, Any]: ...

    def hold(self, seconds: float) -> None:
        """Keep the GPU busy: what is launched next starts no earlier."""
        ...


def open_gpu(program: str, kv_bytes: int, rates: str | None) -> Machine:
    """Return this machine's GPU, or end the program with the reason why there is none to use."""
    from gpu_machine import SETUP_ERRORS, Gpu  # needs CUDA's bindings

    torch.set_grad_enabled(False)
    try:
        return Gpu(kv_bytes, rates=rates)
    except SETUP_ERRORS as error:
        raise SystemExit(f"{program}: {error}") from error


def main() -> None:
    given = _arguments()
    measure(open_gpu("step_launch", _KV_BYTES, given.rates), given)


def _arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="at most")
    parser.add_argument("--rates", choices=("measured", "assumed"), help="of GEMMs")
    parser.add_argument("--kept", action="store_true", help="weights at the host, all kept in HBM")
    parser.add_argument("--warm", action="store_true", help="GEMMs of usual prompts run before")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a kind")
    parser.add_argument("--profile", action="store_true", help="the host's side of a mixed step")
    parser.add_argument("--out", type=Path, help="JSON")
    return parser.parse_args(arguments)


def measure(machine: Machine, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time every kind of step; print and return a row for each, written to `given.out` too."""
    began_s = time.monotonic()
    bench = Bench(machine, given)
    cases = [(decodes, 0) for decodes in DECODES]
    cases += [*MIXED, *((0, tokens) for tokens in PROMPTS)]
    rows: list[dict[str, Any]] = []
    gemms, warm_s = machine.warm_gemms() if given.warm else (0, 0.0)
    print(f"{gemms} GEMMs of prompts were run before: {warm_s:.2f} s")
    host = {**bench.lengths(NEW_LENGTHS), **bench.live(LIVE_PROMPTS)}
    for name, took_s in host.items():
        print(f"host, {len(took_s)} prompts, {name}: median {1e3 * median(took_s):.2f} ms, mean"
              f" {1e3 * fmean(took_s):.2f}, most {1e3 * max(took_s):.2f}", flush=True)  # fmt: skip
    print(f"{'step':>22}{'wall':>9}{'host':>9}{'gpu':>9}{'none':>9}{'slow':>9}  ms", flush=True)
    for decodes, tokens in cases:
        row = bench.case(decodes, tokens)
        rows.append(row)
        times = ("wall_s", "host_s", "gpu_s", "launched_wall_s", "slowest_s")
        shown = "".join(f"{1e3 * row[name]:9.2f}" for name in times)
        print(f"{_name(decodes, tokens):>22}{shown}", flush=True)
    if given.profile:
        bench.profile(*MIXED[1])
    results = {
        "gpu": machine.name, "torch": torch.__version__, "picked_by": machine.picked_by,
        "steps": rows, "lengths": host, "gemms_warmed": gemms, "gemm_warm_s": warm_s,
        "seconds": time.monotonic() - began_s,
    }  # fmt: skip
    report(
        results, given.out, show=False, shape=given.shape, layers=given.layers, kept=given.kept,
        warm=given.warm, steps=given.steps,
    )  # fmt: skip
    return rows


class Bench:
    """One model on one machine."""

    def __init__(self, machine: Machine, given: argparse.Namespace) -> None:
        self._machine = machine
        self._steps: int = given.steps
        config = config_of(given.shape, given.layers)
        machine.warm(config)
        size = buffer_bytes(config)
        linear, cache = machine.linear(size if given.kept else 0)
        self._engine = Engine(machine, linear, cache)
        home = "host" if given.kept else "hbm"
        self._engine.attach("a", config, machine.buffer(home, size))

    def case(self, decodes: int, tokens: int) -> dict[str, Any]:
        """Times of a step of `decodes` sequences, and a prompt of `tokens` if there are any."""
        engine = self._engine
        talks = self._talks(decodes)
        wall_s, slowest_s = self._wall_s(talks, tokens)
        host_s = median(self._host_s(talks, tokens) for _ in range(self._steps))
        gpu_s = median(self._gpu_s(talks, tokens, 2 * host_s) for _ in range(self._steps))
        graphs, engine.ops.graphs = engine.ops.graphs, None
        launched_wall_s, _ = self._wall_s(talks, tokens)
        engine.ops.graphs = graphs
        engine.end()
        return {
            "decodes": decodes, "prompt_tokens": tokens, "wall_s": wall_s, "host_s": host_s,
            "gpu_s": gpu_s, "launched_wall_s": launched_wall_s, "slowest_s": slowest_s,
        }  # fmt: skip

    def lengths(self, tokens: Sequence[int]) -> dict[str, list[float]]:
        """Return the host's times for one prompt of each length, twice."""
        self._ended_s(_FIRST_PROMPT)
        names = ("new lengths", "the same again")
        return {name: [self._ended_s(one) for one in tokens] for name in names}

    def live(self, count: int) -> dict[str, list[float]]:
        """Return the host's times for prompts as they come to a server, and for the same prompts
        again."""
        chance = random.Random(11)
        tokens = [
            min(_LIVE_MOST, max(1, int(chance.lognormvariate(log(_LIVE_MEDIAN), _LIVE_SPREAD))))
            for _ in range(count)
        ]
        names = ("live", "live again")
        return {name: [self._answered_s(one) for one in tokens] for name in names}

    def _answered_s(self, tokens: int) -> float:
        """Answer one request after a pause. Return the host's time for its prompt."""
        time.sleep(_LIVE_PAUSE_S)
        names = self._batch([], tokens)
        begin_s = time.perf_counter()
        self._engine.launch(names)
        taken_s = time.perf_counter() - begin_s
        self._engine.finish()
        self._engine.decode(names, _LIVE_DECODES)
        self._engine.end()
        return taken_s

    def _ended_s(self, tokens: int) -> float:
        taken_s = self._host_s([], tokens)
        self._engine.end()
        return taken_s

    def profile(self, decodes: int, tokens: int) -> None:
        """Print where the host's time goes in such a step."""
        talks = self._talks(decodes)
        profiler = cProfile.Profile()
        for number in range(_WARM + self._steps):
            names = self._batch(talks, tokens)
            self._machine.synchronize()
            if number >= _WARM:
                profiler.enable()
            self._engine.launch(names)
            profiler.disable()
            self._engine.finish()
        self._engine.end()
        print(f"host's side of {self._steps} steps of {_name(decodes, tokens)}:")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(_TOP)

    def _talks(self, count: int, context: int = 0) -> list[str]:
        """So many requests whose prompts, of `CONTEXT` tokens if not said, are computed."""
        length = context or CONTEXT
        talks = self._engine.talk("a", length, count) if count else []
        at_once = max(1, _PREFILL_TOKENS // length)
        for start in range(0, count, at_once):
            self._engine.step(talks[start : start + at_once])
        return talks

    def _batch(self, talks: Sequence[str], tokens: int) -> list[str]:
        """Decodes first, as the policy has them."""
        return [*talks, *(self._engine.talk("a", tokens) if tokens else [])]

    def _wall_s(self, talks: Sequence[str], tokens: int) -> tuple[float, float]:
        """Of a usual step, and of the slowest one, captures among them."""
        batches = [self._batch(talks, tokens) for _ in range(_WARM + self._steps)]
        times = self._engine.steps(batches)
        return median(times[_WARM:]), max(times)

    def _host_s(self, talks: Sequence[str], tokens: int) -> float:
        names = self._batch(talks, tokens)
        self._machine.synchronize()
        begin_s = time.perf_counter()
        self._engine.launch(names)
        taken_s = time.perf_counter() - begin_s
        self._engine.finish()
        return taken_s

    def _gpu_s(self, talks: Sequence[str], tokens: int, hold_s: float) -> float:
        names = self._batch(talks, tokens)
        self._machine.synchronize()
        self._machine.hold(hold_s)
        begin = self._machine.mark()
        self._engine.launch(names)
        end = self._machine.mark()
        self._engine.finish()
        return self._machine.elapsed_s(begin, end)


def _name(decodes: int, tokens: int) -> str:
    parts = [f"{decodes} decodes"] * (decodes > 0) + [f"prompt of {tokens}"] * (tokens > 0)
    return " + ".join(parts)


if __name__ == "__main__":
    main()
