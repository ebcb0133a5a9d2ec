"""Race test of the GEMM kernels: chains of random launches, replayed, every result checked.

    python tests/gpu/stress_gemm.py [--launches 1000000] [--minutes 3] [--seed 0] [--out FILE]
                                    [--only split,direct-...] [--plain]

A round makes random GEMMs (kernel variant, sizes, home of W, early start) and checks each alone
against float32. Then it runs all of them as one chain many times over, in a CUDA graph or launched
one by one. Between them stand other kernels and copies; on a second stream runs the chain of the
round before, or cuBLAS and copies in both directions. Outputs lie in one buffer that is poisoned
before a chain and compared bit for bit after it, gaps between outputs included.

It ends with status 1 and says what it was at if a result differs, a launch fails or nothing moves
for 30 seconds. A CUDA error ends the process: what ran at the time is named.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.kernels.gpu import driver
from c2cserve.kernels.gpu.aot.repository import Repository
from c2cserve.kernels.gpu.aot.variants import Variant
from c2cserve.kernels.gpu.elementwise import rms_norm
from c2cserve.kernels.gpu.gemm.dataflows.table import VARIANTS
from c2cserve.kernels.gpu.gemm.launchers.direct import direct, gated_map, grouped, split, weight_map
from c2cserve.kernels.gpu.gemm.launchers.hybrid import hybrid
from c2cserve.kernels.gpu.gemm.launchers.staged import ring, tee
from c2cserve.kernels.gpu.gemm.measure import capture
from c2cserve.kernels.gpu.gemm.traffic import Tiles
from c2cserve.kernels.gpu.gemm.weight import TORCH_DTYPES, WeightHandle
from c2cserve.kernels.gpu.launch_context import LaunchContext

CHAIN = 64
REPLAYS = 120
POISON = 0x7FC1
"""A NaN of bfloat16 and float16."""
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HOST_BYTES = 2 << 20
"""Of a weight in host memory, at most: a larger one would make the link the test's whole time."""
SLOT_BYTES = 64 << 20
SILENCE_S = 30.0


@dataclass(frozen=True)
class Gemm:
    """One launch, ready to be repeated. `out` is its window of the round's buffer."""

    name: str
    launch: Callable[[], None]
    out: Tensor
    reference: Tensor
    roundings: float


@dataclass(frozen=True)
class Buffers:
    """Random operands by dtype; every GEMM's X and W are views of these."""

    gpu: dict[torch.dtype, Tensor]
    host: dict[torch.dtype, Tensor]
    peer: dict[torch.dtype, Tensor]
    """Without a neighbour this is local memory: W has no map there, and launches start early."""

    @classmethod
    def make(cls) -> "Buffers":
        def some(count: int, dtype: torch.dtype) -> Tensor:
            return (torch.randn(count, device="cuda") / 4).to(dtype)

        gpu = {dtype: some(96 << 20, dtype) for dtype in ROUNDING}
        host = {dtype: some(16 << 20, dtype).cpu().pin_memory() for dtype in ROUNDING}
        peer = gpu
        if torch.cuda.device_count() > 1:
            driver.enable_peer(0, 1)
            peer = {dtype: some(96 << 20, dtype).to("cuda:1") for dtype in ROUNDING}
        return cls(gpu, host, peer)

    def at(self, home: Home, dtype: torch.dtype) -> Tensor:
        return {"hbm": self.gpu, "host": self.host, "peer": self.peer}[home][dtype]


class Round:
    """A chain of random GEMMs on a context of its own."""

    def __init__(
        self,
        rng: random.Random,
        context: LaunchContext,
        buffers: Buffers,
        variants: Sequence[Variant],
    ) -> None:
        self._rng, self._context, self._buffers = rng, context, buffers
        self._maps = torch.zeros(CHAIN * driver.MAP_BYTES, dtype=torch.uint8, device="cuda")
        self._windows: list[tuple[int, int]] = []
        self._size = 0
        self.scratch = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
        self.norm = torch.ones(1024, device="cuda")
        plans = [self._plan(rng.choice(variants)) for _ in range(CHAIN)]
        self.outs = torch.full((self._size,), POISON, dtype=torch.int16, device="cuda")
        self.gemms = [self._make(i, *plan) for i, plan in enumerate(plans)]
        self.expected = torch.full_like(self.outs, POISON)
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")

    # ---- making ---------------------------------------------------------------------------------

    def _plan(self, variant: Variant) -> tuple[Variant, int, int, int, list[int], Home]:
        rng = self._rng
        k = 8 * _skewed(rng, 1, 512)
        n = 2 * _skewed(rng, 1, 1536)
        most = variant.bx * (variant.cluster if variant.source != "split" else 1)
        m = rng.choice((1, rng.randint(1, variant.bx), rng.randint(1, most), most, most + 1))
        counts: list[int] = []
        if variant.source == "grouped":
            counts = [rng.choice((0, 1, rng.randint(0, most))) for _ in range(rng.randint(1, 12))]
            counts[rng.randrange(len(counts))] += 1
            m, n = sum(counts), min(n, 512)
        weight_bytes = 2 * n * k * max(1, len(counts))
        homes: list[Home] = ["hbm", "hbm", "peer"]
        if weight_bytes <= HOST_BYTES:
            homes.append("host")
        if variant.source in ("ring", "hybrid") or variant.tee:
            homes = ["peer"] if variant.tee else ["hbm", "peer"]
        columns = n // 2 if variant.gated else n
        stride = columns + rng.choice((0, 1, 8, 24))
        if variant.partial_bytes == 2:
            stride = -(-stride // 8) * 8  # its sums are boxes of the output
        start = -(-self._size // 64) * 64 + 64
        self._windows.append((start, stride))
        self._size = start + m * stride + 64
        return variant, m, n, k, counts, rng.choice(homes)

    def _make(
        self, i: int, variant: Variant, m: int, n: int, k: int, counts: list[int], home: Home
    ) -> Gemm:
        rng, dtype = self._rng, TORCH_DTYPES[variant.dtype]
        near = self._buffers.gpu[dtype]
        x_stride = k + 8 * rng.randint(0, 3)
        x = _piece(rng, near, m * x_stride).view(m, x_stride)[:, :k]
        shape = (len(counts), n, k) if counts else (n, k)
        flat = _piece(rng, self._buffers.at(home, dtype), n * k * max(1, len(counts)))
        weight = flat.view(shape)
        handle = WeightHandle(flat.data_ptr(), shape, variant.dtype, home, flat)
        by_map = home == "hbm" and (variant.cluster == 1 or variant.source == "split")
        if by_map and variant.source in ("direct", "split", "grouped") and not variant.tee:
            place = self._maps[i * driver.MAP_BYTES :][: driver.MAP_BYTES]
            data = gated_map(handle) if variant.gated else weight_map(handle)
            place.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            handle = replace(handle, map_pointer=place.data_ptr())
        bias = None
        if not counts and rng.random() < 0.5:
            bias = _piece(rng, near, n)
        start, stride = self._windows[i]
        columns = n // 2 if variant.gated else n
        window = self.outs[start : start + m * stride].view(dtype).view(m, stride)
        out = window[:, :columns]
        launch = _launcher(self._context, variant, x, handle, bias, out, counts, rng)
        reference = _reference(x, weight.cuda(), bias, counts, gated=variant.gated)
        name = f"{variant.name} m={m} n={n} k={k} {home}{' by map' if handle.map_pointer else ''}"
        roundings = 4.0 if variant.gated or variant.partial_bytes == 2 else 2.0
        return Gemm(name, launch, out, reference, roundings)

    def check_alone(self) -> None:
        """Every GEMM by itself, against float32; the bits it gives are expected from then on."""
        for gemm in self.gemms:
            gemm.launch()
            out, unit = gemm.out.float(), ROUNDING[gemm.out.dtype]
            scale = gemm.reference.abs() + gemm.reference.square().mean().sqrt()
            worst = float(((out - gemm.reference).abs() / scale).max())
            if not worst <= 1.1 * unit * gemm.roundings:
                raise SystemExit(f"wrong alone: {gemm.name}: off by {worst / unit:.2f} roundings")
        self.expected.copy_(self.outs)

    # ---- running --------------------------------------------------------------------------------

    def chain(self) -> list[Callable[[], object]]:
        """The launches, other kernels between them, and the comparison."""
        steps: list[Callable[[], object]] = [lambda: self.outs.fill_(POISON)]
        for gemm in self.gemms:
            steps.append(gemm.launch)
            chance = self._rng.random()
            if chance < 0.15:
                steps.append(lambda: rms_norm(self.scratch, self.norm, 1e-5))
            elif chance < 0.22:
                steps.append(lambda: self.scratch.mul_(1.0))
            elif chance < 0.26:
                steps.append(lambda: self.norm.copy_(self.norm))
        return [*steps, self._compare]

    def _compare(self) -> None:
        self.bad += (self.outs != self.expected).sum()

    def culprits(self) -> list[str]:
        """What differs now, after a chain that ended in a difference."""
        names = []
        for gemm, (start, stride) in zip(self.gemms, self._windows, strict=True):
            end = start + len(gemm.out) * stride
            if not torch.equal(self.outs[start:end], self.expected[start:end]):
                names.append(gemm.name)
        return names


def _skewed(rng: random.Random, least: int, most: int) -> int:
    """Mostly small, sometimes up to `most`."""
    return max(least, min(most, int(most ** rng.random())))


def _piece(rng: random.Random, buffer: Tensor, count: int) -> Tensor:
    start = rng.randrange(0, (buffer.numel() - count) // 64) * 64
    return buffer[start : start + count]


def _launcher(
    context: LaunchContext, variant: Variant, x: Tensor, w: WeightHandle, bias: Tensor | None,
    out: Tensor, counts: list[int], rng: random.Random,
) -> Callable[[], None]:  # fmt: skip
    tiles = Tiles(bx=variant.bx, cluster=variant.cluster)
    match variant.source:
        case "grouped":
            ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).cuda()
            return lambda: grouped(context, x, w, ends, out, tiles)
        case "split":
            return lambda: split(context, x, w, bias, out, tiles, gated=variant.gated)
        case "ring":
            tiles = replace(tiles, panel_rows=rng.choice((128, 256, 512)), slots=rng.choice((2, 3)))
            return lambda: ring(context, x, w, bias, out, tiles)
        case "hybrid":
            # All columns output-stationary: what asym adds comes in any order, so bits differ.
            tiles = Tiles(bx=variant.bx, kp=variant.kp, partial_bytes=variant.partial_bytes or 4)
            tiles = replace(tiles, alpha=1.0)
            return lambda: hybrid(context, x, w, bias, out, tiles)
        case "direct" if variant.tee:
            return lambda: tee(context, x, w, bias, out, tiles)
        case "direct":
            return lambda: direct(context, x, w, bias, out, tiles, gated=variant.gated)


def _reference(
    x: Tensor, w: Tensor, bias: Tensor | None, counts: list[int], *, gated: bool
) -> Tensor:
    if counts:
        parts = [a.float() @ b.float().t() for a, b in zip(x.split(counts), w, strict=True)]
        return torch.cat(parts)
    both = x.float() @ w.float().t()
    if bias is not None:
        both += bias.float()
    if not gated:
        return both
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Beside:
    """What runs on a second stream meanwhile."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._square = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        self._near = torch.zeros(4 << 20, device="cuda")
        self._far = torch.zeros(4 << 20).pin_memory()

    def once(self) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(4):
                torch.mm(self._square, self._square)
            self._near.copy_(self._far, non_blocking=True)
            self._far.copy_(self._near, non_blocking=True)


class Watch:
    """Ends the process when nothing moves."""

    def __init__(self, report: "Report") -> None:
        self._report, self.moved_s = report, time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while time.monotonic() - self.moved_s < SILENCE_S:
            time.sleep(1.0)
        self._report.end(f"nothing moved for {SILENCE_S:.0f} s", hard=True)


class Report:
    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._began_s = given, time.monotonic()
        self.launches, self.rounds = 0, 0
        self.by_source: Counter[str] = Counter()
        self.at: list[str] = []

    def end(self, fault: str = "", *, hard: bool = False) -> None:
        """Print the report and leave."""
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": os.environ.get("C2CSERVE_COMMIT", ""),
            "launches": self.launches, "rounds": self.rounds, "seed": self._given.seed,
            "seconds": round(time.monotonic() - self._began_s, 1), "fault": fault,
            "by_source": dict(self.by_source), "at": self.at if fault else [],
        }  # fmt: skip
        if not hard:
            result["machine"] = {"gpu": torch.cuda.get_device_name(0)}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        if self._given.out:
            self._given.out.write_text(json.dumps(result, indent=1) + "\n")
        # After a CUDA error destructors can wait for ever.
        os._exit(1 if fault else 0)


def stress(given: argparse.Namespace, report: Report, watch: Watch) -> None:
    """Run rounds until there were enough launches, or for the time given."""
    rng, buffers = random.Random(given.seed), Buffers.make()
    torch.manual_seed(given.seed)
    repository = Repository(0)
    contexts = [LaunchContext(0, repository), LaunchContext(0, repository)]
    variants = [v for v in VARIANTS if _wanted(v, given.only)]
    if not variants:
        raise SystemExit(f"no variant is called {given.only}")
    beside, stream = Beside(), torch.cuda.Stream()
    previous: tuple[Round, torch.cuda.CUDAGraph] | None = None
    until_s = time.monotonic() + 60 * given.minutes
    while report.launches < given.launches and time.monotonic() < until_s:
        with torch.cuda.stream(stream):
            current = Round(rng, contexts[report.rounds % 2], buffers, variants)
            current.check_alone()
        report.at = [gemm.name for gemm in current.gemms]
        report.by_source.update(name.split("-")[0] for name in report.at)
        torch.cuda.synchronize()
        steps = current.chain()
        for _ in range(2):  # a capture cannot take memory for weights that pass through
            contexts[report.rounds % 2].next_slot().hold(SLOT_BYTES)
        graph = capture(contexts[report.rounds % 2], stream, steps)
        mode = rng.choice(("alone", "copies", "chain"))
        with torch.cuda.stream(stream):
            if rng.random() < 0.2:
                for step in steps:
                    step()
            for replay in range(REPLAYS):
                graph.replay()
                if mode == "copies" and replay % 2 == 0:
                    beside.once()
                elif mode == "chain" and previous is not None and not given.plain:
                    with torch.cuda.stream(beside.stream):
                        previous[1].replay()
                        report.launches += CHAIN
        torch.cuda.synchronize()
        watch.moved_s = time.monotonic()
        report.launches += CHAIN * REPLAYS
        report.rounds += 1
        for one in (current, *([previous[0]] if previous else [])):
            if int(one.bad):
                report.end(f"{int(one.bad)} elements differ: {one.culprits() or 'not any more'}")
        previous = current, graph


def _wanted(variant: Variant, only: str) -> bool:
    return not only or any(variant.name.startswith(prefix) for prefix in only.split(","))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=3.0, help="no round begins after it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="variants whose names begin so, by commas")
    parser.add_argument("--plain", action="store_true", help="no second chain at the same time")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    report = Report(given)
    watch = Watch(report)
    try:
        stress(given, report, watch)
    except (RuntimeError, driver.CudaError) as error:
        report.end(f"{type(error).__name__}: {str(error).splitlines()[0]}", hard=True)
    enough = report.launches >= given.launches
    report.end("" if enough else f"only {report.launches} launches in the time given")


if __name__ == "__main__":
    sys.exit(main())
