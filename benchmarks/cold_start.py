"""Models and long prefixes that come from host memory, over one link and over two: JSON.

python benchmarks/cold_start.py [--shape llama-8b] [--parts cold,prefix]
    [--tokens 16384,32768,65536] [--out FILE]

cold     all matrices of a model from host memory into HBM, and its first token for a prompt of
         512. The prompt's layers run as they arrive, as on a slice (`engine.gpu.weight_loads`);
         and, to compare, when all of them are there. Over the bytes by the sum of the paths
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
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from gpu_engine_run import Engine, Machine
from gpu_models import raw_config
from report import report
from torch import Tensor

from c2cserve.core.actions import Move
from c2cserve.core.tensors import Home
from c2cserve.engine.gpu.tables import matrices_by_layer
from c2cserve.engine.gpu.weight_loads import WeightLoads
from c2cserve.engine.models.config import ModelConfig, parse_config
from c2cserve.engine.models.layout import plan_layout
from c2cserve.engine.rotation import HostKv
from c2cserve.kernels.gpu.gemm.weight import WeightHandle
from c2cserve.memory.hbm_cache import HbmCache
from c2cserve.memory.segment import place_tensors
from c2cserve.transfer.engine import Ticket, TransferEngine

PARTS = ("cold", "prefix")
PROMPT, STEP_TOKENS = 512, 8192
_ALIGNMENT = 2 << 20
_COLD_BAR, _FIRST_TOKEN_BAR = 1.1, 1.15
"""Of the model's bytes over the sum of the paths."""
_FIRST_TOKEN_TO_LOAD_BAR = 1.15
_REPEATS = 4
Rows = list[dict[str, Any]]
Loads = WeightLoads[Ticket]


class Site(Protocol):
    """A machine's memory and links; in tests, a machine without a GPU."""

    @property
    def machine(self) -> "ColdMachine": ...

    @property
    def links(self) -> int: ...

    def opened(self, links: int) -> AbstractContextManager[TransferEngine]: ...

    def loading(self, engine: TransferEngine, room: Tensor) -> tuple[Any, HbmCache, Loads]:
        """Return GEMMs that find weights in `room`, that cache, and what loads models into it."""
        ...

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
        _, end = place_tensors(plan_layout(self._config), 0)
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
        rows: Rows = []
        for links in range(1, self._site.links + 1):
            with self._site.opened(links) as engine:
                rows.append({"links": links, "prompt": PROMPT} | self._cold(engine, links))
        last = rows[-1]
        what = f"from host to resident over {last['links']} links"
        self._hold(f"{what}, to the sum of paths", last["load_to_floor"], _COLD_BAR)
        ratio = last["first_token_to_floor"]
        self._hold(f"{what}, first token to the sum of paths", ratio, _FIRST_TOKEN_BAR)
        ratio = last["first_token_to_load"]
        self._hold(f"{what}, first token to its load", ratio, _FIRST_TOKEN_TO_LOAD_BAR)
        return rows

    def _cold(self, engine: TransferEngine, links: int) -> dict[str, Any]:
        multiply, cache, loads = self._site.loading(engine, self._here)
        run = Engine(self._machine, multiply, cache, arrived=loads.arrived)
        prepared = run.attach("a", self._config, self._home).prepared(run.ops)
        assert prepared is not None
        layers = matrices_by_layer(*prepared, self._machine.device)
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        tokens: list[list[int]] = []
        prompt = run.prompt("a", PROMPT)
        for _ in range(_REPEATS):
            for waits in (False, True):
                self._here.zero_()
                talk = run.talk_about("a", prompt)
                self._machine.synchronize()
                begun_s = time.perf_counter()
                loads.fetch("a", lambda: layers, 0)
                while waits and loads.arrived("a") is not None:
                    pass
                run.launch([talk])
                tokens.append(run.finish())
                first_s = time.perf_counter() - begun_s
                [outcome] = loads.poll()
                assert not outcome.refused, "the model does not fit"
                times[waits].append((outcome.took_s, first_s))
                run.end()
                _compare(cache, layers)
                loads.release("a")
        assert all(one == tokens[0] for one in tokens), "the first tokens differ"
        run.detach("a")
        size = sum(w.bytes for layer in layers for w in layer)
        floor_s = size / self.rates[links]
        load_s, first_s = (median(column[1:]) for column in zip(*times[False], strict=True))
        waited_s = median(first for _, first in times[True][1:])
        return {
            "bytes": size, "floor_s": floor_s, "load_s": load_s, "first_token_s": first_s,
            "first_token_after_load_s": waited_s, "load_to_floor": load_s / floor_s,
            "first_token_to_floor": first_s / floor_s, "first_token_to_load": first_s / load_s,
        }  # fmt: skip

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


def _compare(cache: HbmCache, layers: Sequence[Sequence[WeightHandle]]) -> None:
    """Compare what has arrived with what is at home."""
    for w in (one for layer in layers for one in layer):
        near, home = cache.location(w), w.owner
        assert near.home == "hbm", "a matrix has not arrived"
        assert isinstance(near.owner, Tensor)
        assert isinstance(home, Tensor)
        there = home.view(torch.uint8).flatten().to(near.owner.device)
        assert torch.equal(near.owner, there), "other bytes have arrived"


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
