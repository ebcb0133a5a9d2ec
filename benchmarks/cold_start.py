"""Models and long prefixes that come from host memory, over one link and over two: JSON.

python benchmarks/cold_start.py [--shape llama-8b] [--parts cold,prefix]
    [--tokens 16384,32768,65536] [--out FILE]

cold     all matrices of a model from host memory into HBM, then its first token for a prompt of
         512; over its bytes by the sum of the paths
prefix   the KV of so many tokens from host memory, scattered blocks, over computing it and over
         one path (MMA's figure 15)

The sum of the paths is what CUDA's copies into all of the GPUs bring at once, in the same run.
Weights are random; what arrives is compared with what left. The exit status is 1 if a bar is
missed.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from gpu_engine_run import Engine, Machine
from gpu_models import raw_config
from report import report
from torch import Tensor

from c2cserve.core.actions import Move
from c2cserve.core.tensors import ITEM_BYTES, Home
from c2cserve.engine.models.config import ModelConfig, parse_config
from c2cserve.engine.models.layout import plan_layout
from c2cserve.engine.rotation import HostKv
from c2cserve.memory.segment import place_tensors
from c2cserve.transfer.engine import TransferEngine
from c2cserve.transfer.moves import HOST, Segment, pack

PARTS = ("cold", "prefix")
PROMPT, STEP_TOKENS = 512, 8192
_ALIGNMENT = 2 << 20
_COLD_BAR, _FIRST_TOKEN_BAR = 1.1, 1.15
"""Of the model's bytes over the sum of the paths."""
_REPEATS = 4
_COMPARED = 1 << 30
Rows = list[dict[str, Any]]


class Site(Protocol):
    """A machine's memory and links; in tests, a machine without a GPU."""

    @property
    def machine(self) -> "ColdMachine": ...

    @property
    def links(self) -> int: ...

    def opened(self, links: int) -> AbstractContextManager[TransferEngine]: ...

    def rate(self, links: int) -> float:
        """Bytes a second that plain copies into so many GPUs bring at once."""
        ...

    def host_kv(self, engine: TransferEngine, size: int) -> HostKv: ...


class ColdMachine(Machine, Protocol):
    def buffer(self, home: Home, size: int) -> Tensor: ...

    def linear(self, kept_bytes: int = 0) -> tuple[Any, Any]: ...

    def warm(self, config: ModelConfig) -> None: ...


class ColdStart:
    def __init__(self, site: Site, shape: str, longest: int) -> None:
        self._site, self._machine = site, site.machine
        raw = raw_config(shape) | {"max_position_embeddings": max(16384, longest + STEP_TOKENS)}
        self._config = parse_config(raw)
        self._machine.warm(self._config)
        self.bars: Rows = []
        places, end = place_tensors(plan_layout(self._config), 0)
        # Norms are in HBM for all models, as a slice has them.
        self._spans = sorted(
            (place.offset, prod(place.shape) * ITEM_BYTES[place.dtype])
            for place in places.values()
            if len(place.shape) > 1
        )
        size = end + _ALIGNMENT
        self._here = self._machine.buffer("hbm", size)
        self._home = self._machine.buffer("host", size)
        self.rates = {n: site.rate(n) for n in range(1, site.links + 1)}
        self._engine = Engine(self._machine, self._machine.linear()[0])

    def _hold(self, what: str, value: float, bar: float) -> None:
        met = value <= bar
        self.bars.append({"bar": what, "value": value, "limit": bar, "met": met})
        print(f"{what}: {value:.3f} (at most {bar:g}: {'met' if met else 'MISSED'})", flush=True)

    # ---- a model ---------------------------------------------------------------------------------

    def cold(self) -> Rows:
        """The bars are of all links."""
        self._engine.attach("a", self._config, self._here)
        near, far = self._here.data_ptr(), self._home.data_ptr()
        packed = pack(Segment(near + at, far + at, size, 0, HOST) for at, size in self._spans)
        size = sum(size for _, size in self._spans)
        self._first_token_s()
        rows: Rows = []
        for links in range(1, self._site.links + 1):
            loads: list[float] = []
            firsts: list[float] = []
            with self._site.opened(links) as engine:
                for _ in range(_REPEATS):
                    for at, count in self._spans:
                        self._here[at : at + count].zero_()
                    [talk] = self._engine.talk("a", PROMPT)
                    self._machine.synchronize()
                    begun_s = time.perf_counter()
                    engine.wait(engine.submit(packed))
                    loads.append(time.perf_counter() - begun_s)
                    self._engine.step([talk])
                    firsts.append(time.perf_counter() - begun_s)
                    self._engine.end()
            self._compare()
            floor_s = size / self.rates[links]
            load_s, first_s = median(loads[1:]), median(firsts[1:])
            rows.append({
                "links": links, "bytes": size, "floor_s": floor_s, "load_s": load_s,
                "first_token_s": first_s, "prompt": PROMPT, "load_to_floor": load_s / floor_s,
                "first_token_to_floor": first_s / floor_s, "first_token_to_load": first_s / load_s,
            })  # fmt: skip
        last = rows[-1]
        what = f"from host to resident over {last['links']} links"
        self._hold(f"{what}, to the sum of paths", last["load_to_floor"], _COLD_BAR)
        ratio = last["first_token_to_floor"]
        self._hold(f"{what}, first token to the sum of paths", ratio, _FIRST_TOKEN_BAR)
        return rows

    def _first_token_s(self) -> float:
        seconds = self._engine.step(self._engine.talk("a", PROMPT))
        self._engine.end()
        return seconds

    def _compare(self) -> None:
        for at, size in self._spans:
            for start in range(at, at + size, _COMPARED):
                stop = min(start + _COMPARED, at + size)
                there = self._home[start:stop].to(self._here.device)
                assert torch.equal(self._here[start:stop], there), f"other bytes from {start} on"

    # ---- prefixes --------------------------------------------------------------------------------

    def prefix(self, counts: Sequence[int]) -> Rows:
        decoder = self._engine.attach("p", self._config, self._here)
        block, rows = decoder.kv.block_bytes, list[dict[str, Any]]()
        [talk] = self._engine.talk("p", STEP_TOKENS)
        self._engine.prefill(talk, STEP_TOKENS)  # whatever is loaded at first use
        self._engine.end()
        for tokens in counts:
            [talk] = self._engine.talk("p", tokens)
            computed_s = self._engine.prefill(talk, STEP_TOKENS)
            places = list(self._engine.blocks(talk))
            random.Random(1).shuffle(places)
            size = len(places) * block
            row: dict[str, Any] = {"tokens": tokens, "bytes": size, "computed_s": computed_s}
            for links in range(1, self._site.links + 1):
                with self._site.opened(links) as engine:
                    row[f"links_{links}_s"] = self._from_host_s(engine, places, block)
            fetched_s = row[f"links_{self._site.links}_s"]
            row |= {"over_computing": computed_s / fetched_s,
                    "over_one_path": row["links_1_s"] / fetched_s}  # fmt: skip
            print(" ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
            rows.append(row)
            self._engine.end()
        return rows

    def _from_host_s(self, engine: TransferEngine, places: Sequence[int], block: int) -> float:
        """Seconds from asking for blocks that went out to their being back, with their bytes."""
        kv = self._site.host_kv(engine, len(places) * block)
        arena = self._machine.arena
        kept = arena[: max(places) + block].clone()
        self._move(kv, Move("p", "out", 0, tuple(places)), block)
        seconds: list[float] = []
        for _ in range(_REPEATS - 1):
            arena[: kept.numel()].zero_()
            self._machine.synchronize()
            begun_s = time.perf_counter()
            self._move(kv, Move("p", "in", 0, tuple(places), kept=len(places)), block)
            seconds.append(time.perf_counter() - begun_s)
        assert torch.equal(arena[: kept.numel()], kept), "the prefix came back with other bytes"
        kv.forget("p")
        return min(seconds)

    def _move(self, kv: HostKv, move: Move, block: int) -> None:
        kv.start(move, block)
        while not kv.finished():
            pass


def measure(site: Site, shape: str, parts: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    start = ColdStart(site, shape, max(counts))
    run: dict[str, Callable[[], Rows]] = {
        "cold": start.cold,
        "prefix": lambda: start.prefix(counts),
    }
    results: dict[str, Any] = {"paths_gb_per_s": {n: r / 1e9 for n, r in start.rates.items()}}
    for part in parts:
        begun_s = time.perf_counter()
        results[part] = run[part]()
        print(f"{part}: {time.perf_counter() - begun_s:.1f} s", flush=True)
    return results | {"bars": start.bars}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas between")
    parser.add_argument("--tokens", default="16384,32768,65536", help="of prefixes")
    parser.add_argument("--out", type=Path, help="JSON")
    given = parser.parse_args(arguments)
    parts, counts = given.parts.split(","), [int(one) for one in given.tokens.split(",")]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("cold_start: torch sees no GPU")
    from cold_start_gpus import GpuSite  # needs CUDA's bindings

    began_s = time.perf_counter()
    torch.set_grad_enabled(False)
    site = GpuSite(given.shape, max(counts) if "prefix" in parts else PROMPT)
    results = measure(site, given.shape, parts, counts)
    results |= {"gpu": torch.cuda.get_device_name(0), "wall_s": time.perf_counter() - began_s}
    report(results, given.out, shape=given.shape, parts=given.parts, tokens=counts)
    if not all(bar["met"] for bar in results["bars"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
