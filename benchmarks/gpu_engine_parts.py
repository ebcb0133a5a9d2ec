"""What `gpu_engine.py` measures of one shape, over a `gpu_engine_run.Machine`."""

import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from gpu_engine_run import Counted, Engine, attention_layer, decode_batch
from gpu_models import attention_flops, config_of
from torch import Tensor

from c2cserve.core.tensors import Home
from c2cserve.engine.models.config import ModelConfig
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.models.layout import plan_layout
from c2cserve.engine.models.rope import RopeTables
from c2cserve.kernels.layer import Layer
from c2cserve.memory.segment import place_tensors

PARTS = ("stream", "resident", "prefill", "switch", "copy", "cache")
PROMPT, LONG_PROMPT, CONTEXT = 512, 8192, 512
ROWS = (1, 32)
BARS = {"ttft": 1.15, "stream": 1.1, "resident": 1.15, "prefill": 0.6, "p50": 5e-3, "p99": 20e-3}
_ALIGNMENT = 2 << 20
_SWITCH_MODELS, _SWITCH_LAYERS, _SWITCHES = 24, 2, 240
_HBM_SPARE = 8 << 30
_WARM = 4
"""Steps of a batch before those that count: the first loads, the second is captured."""


class Run:
    """One shape on one machine; figures are printed as they come and kept."""

    def __init__(
        self, machine: Any, shape: str, layers: int | None, limits: dict[str, Any], *,
        repeats: int = 5,
    ) -> None:  # fmt: skip
        """`machine`: `gpu_machine.Gpu`; `limits`: what its `limits` said."""
        self.machine = machine
        self.shape, self.limits = shape, limits
        self.config = config_of(shape, layers)
        self.bytes = plan_layout(self.config).bytes
        self.figures: list[dict[str, Any]] = []
        self._repeats = repeats
        machine.warm(self.config)

    # ---- what is written down -------------------------------------------------------------------

    def figure(
        self, what: str, seconds: float, floor_s: float | None = None, bar: float | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        """A time, and how it compares with what nothing can beat; `bar`: of their ratio."""
        row: dict[str, Any] = {"what": what, "seconds": seconds, **more}
        said = f"{self.shape}: {what}: {_shown(seconds)}"
        if floor_s is not None:
            row |= {"floor_s": floor_s, "ratio": seconds / floor_s}
            said += f", floor {_shown(floor_s)}, {row['ratio']:.3f}x"
            if bar is not None:
                row |= {"bar": bar, "met": row["ratio"] <= bar}
                said += f" (bar {bar}: {'met' if row['met'] else 'MISSED'})"
        self._keep(row, said)

    def share(self, what: str, seconds: float, share: float, bar: float, **more: Any) -> None:
        met = share >= bar
        row = {"what": what, "seconds": seconds, "share": share, "bar": bar, "met": met, **more}
        said = f"{self.shape}: {what}: {_shown(seconds)}, {share:.1%} of the matrix peak"
        self._keep(row, f"{said} (bar {bar:.0%}: {'met' if met else 'MISSED'})")

    def limit(self, what: str, seconds: float, bar_s: float, **more: Any) -> None:
        met = seconds <= bar_s
        row = {"what": what, "seconds": seconds, "bar_s": bar_s, "met": met, **more}
        said = f"{self.shape}: {what}: {_shown(seconds)}"
        self._keep(row, f"{said} (bar {_shown(bar_s)}: {'met' if met else 'MISSED'})")

    def _keep(self, row: dict[str, Any], said: str) -> None:
        self.figures.append(row)
        print(said, flush=True)

    # ---- parts ----------------------------------------------------------------------------------

    def part(self, name: str) -> None:
        match name:
            case "stream":
                for home in self.machine.homes:
                    self._stream(home)
            case "resident":
                for rows in ROWS:
                    self._resident(rows)
            case "prefill":
                self._prefill(LONG_PROMPT)
            case "switch":
                self._switch(self.machine.homes[0])
            case "copy":
                for home in self.machine.homes:
                    self._copy(home)
            case _:
                for home in self.machine.homes:
                    for kept in (1.0, 0.5):
                        self._cache(home, kept)

    def _stream(self, home: Home) -> None:
        link = self.limits["link_bytes_per_s"][home]
        engine = self._engine()
        buffer = self._buffer(home)
        names = ("a", "b")
        for i, name in enumerate(names):
            engine.attach(name, self.config, buffer, i * _ALIGNMENT)
        first = [self._first_token(engine, name) for name in names]
        counted = self._counted(engine, engine.talk("a", PROMPT))
        times = [self._first_token(engine, names[i % 2]) for i in range(1, self._repeats + 1)]
        floor_s = counted.bytes / link
        self.figure(
            f"TTFT of a switched model, prompt {PROMPT}, from {home}", median(times), floor_s,
            BARS["ttft"], times_s=times, first_use_s=first, bytes=counted.bytes,
            model_bytes_ratio=median(times) / (self.bytes / link),
        )  # fmt: skip
        for rows in ROWS:
            talks = self._talk(engine, rows)
            counted = self._counted(engine, talks)
            times = engine.decode(talks, 2 * self._repeats + _WARM)[_WARM:]
            engine.end()
            self.figure(
                f"decode at batch {rows}, streamed from {home}", median(times),
                counted.bytes / link, BARS["stream"], times_s=times, bytes=counted.bytes,
            )  # fmt: skip

    def _resident(self, rows: int) -> None:
        what = f"decode at batch {rows}, weights in HBM"
        for graphs in (True, False):
            engine = Engine(self.machine, self.machine.linear()[0], graphs=graphs)
            decoder = engine.attach("a", self.config, self._buffer("hbm"))
            talks = self._talk(engine, rows)
            counted = self._counted(engine, talks)
            times = engine.decode(talks, 4 * self._repeats + _WARM)[_WARM:]
            alone = [engine.step(talks) for _ in range(self._repeats)]
            engine.end()
            attention_s = self._attention_s(engine, decoder, rows)
            floor_s = counted.bytes / self.limits["hbm_bytes_per_s"] + attention_s
            if graphs:
                self.figure(
                    what, median(times), floor_s, BARS["resident"], times_s=times,
                    bytes=counted.bytes, attention_s=attention_s, one_at_a_time_s=median(alone),
                )  # fmt: skip
            else:
                self.figure(f"{what}, kernels launched one by one", median(times), floor_s)

    def _prefill(self, tokens: int) -> None:
        engine = self._engine()
        engine.attach("a", self.config, self._buffer("hbm"))
        counted = self._counted(engine, engine.talk("a", tokens))
        times: list[float] = []
        for _ in range(max(2, self._repeats // 2)):
            engine.end()
            times.append(engine.step(engine.talk("a", tokens)))
        engine.end()
        flops = counted.flops + attention_flops(self.config, tokens)
        peak, seconds = self.limits["matmul_flops"], median(times)
        self.share(
            f"prefill of {tokens} tokens, weights in HBM", seconds, flops / seconds / peak,
            BARS["prefill"], times_s=times, flops=flops,
            gemm_share=counted.flops / seconds / peak,
        )  # fmt: skip

    def _switch(self, home: Home) -> None:
        config = config_of(self.shape, min(_SWITCH_LAYERS, self.config.layers))
        engine, buffer = self._engine(), self._buffer(home)
        room = buffer.numel() - _room(config)
        names = [f"m{i}" for i in range(_SWITCH_MODELS)]
        for i, name in enumerate(names):
            offset = room * i // (len(names) - 1) // _ALIGNMENT * _ALIGNMENT
            engine.attach(name, config, buffer, offset)
        first = [self._first_gemm_s(engine, name) for name in names]
        same: list[float] = []
        switched: list[float] = []
        for turns in _shuffles(names, _SWITCHES * self._repeats // 5):
            for name in turns:
                switched.append(self._first_gemm_s(engine, name))
                if len(same) <= len(switched) // 4:
                    same.append(self._first_gemm_s(engine, name))
        engine.end()
        what = f"a switch (from {home}), asking to first GEMM"
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            self.limit(
                f"{what}, {name}", _quantile(switched, share), BARS[name], switches=len(switched),
                same_model_s=_quantile(same, share), first_use_s=_quantile(first, share),
            )  # fmt: skip

    def _copy(self, home: Home) -> None:
        """No streaming: the model is copied, then its prompt is computed."""
        engine, here = self._engine(), self._buffer("hbm")
        engine.attach("a", self.config, here)
        self._first_token(engine, "a")
        source, count = self._buffer(home), _room(self.config)
        times: list[float] = []
        for _ in range(max(2, self._repeats // 2)):
            self.machine.synchronize()
            begin_s = time.perf_counter()
            self.machine.copy(here[:count], source[:count])
            self._first_token(engine, "a")
            times.append(time.perf_counter() - begin_s)
        floor_s = count / self.limits["link_bytes_per_s"][home]
        self.figure(
            f"baseline: copy from {home}, then prefill {PROMPT}", median(times), floor_s,
            times_s=times,
        )  # fmt: skip

    def _cache(self, home: Home, kept: float) -> None:
        budget = min(int(kept * self.bytes), self.machine.free_bytes() - _HBM_SPARE)
        linear, cache = self.machine.linear(budget)
        engine = Engine(self.machine, linear, cache)
        engine.attach("a", self.config, self._buffer(home))
        [talk] = engine.talk("a", PROMPT)
        first_s = engine.step([talk])
        times = engine.decode([talk], _WARM + 2 * self._repeats)
        engine.end()
        self.figure(
            f"decode from {home}, warmed up, HBM keeps {kept:.0%}", median(times[_WARM:]),
            times_s=times, first_step_s=first_s, resident_bytes=cache.bytes, budget_bytes=budget,
        )  # fmt: skip

    # ---- what parts are made of -----------------------------------------------------------------

    def _engine(self) -> Engine:
        return Engine(self.machine, self.machine.linear()[0])

    def _buffer(self, home: Home) -> Tensor:
        return self.machine.buffer(home, buffer_bytes(self.config))

    def _first_token(self, engine: Engine, name: str) -> float:
        """Of a new prompt; requests before it are over."""
        engine.end()
        talks = engine.talk(name, PROMPT)
        self.machine.synchronize()
        return engine.step(talks)

    def _first_gemm_s(self, engine: Engine, name: str) -> float:
        engine.end()
        talks = engine.talk(name, PROMPT)
        self.machine.synchronize()
        engine.watch.arm()
        asked = self.machine.mark()
        engine.step(talks)
        return self.machine.elapsed_s(asked, engine.watch.first)

    def _talk(self, engine: Engine, rows: int) -> list[str]:
        """So many requests whose prompts are computed."""
        talks = engine.talk("a", CONTEXT, rows)
        for start in range(0, rows, 8):
            engine.step(talks[start : start + 8])
        return talks

    def _counted(self, engine: Engine, talks: list[str]) -> Counted:
        """In a step whose kernels are launched one by one."""
        graphs, engine.ops.graphs = engine.ops.graphs, None
        engine.watch.begin_count()
        engine.step(talks)
        engine.ops.graphs = graphs
        return engine.watch.end_count()

    def _attention_s(self, engine: Engine, decoder: Decoder, rows: int) -> float:
        """Of all layers, alone in a graph: rotation and new keys' way into the cache included."""
        config, device = self.config, self.machine.device
        batch = decode_batch(decoder.kv, rows, CONTEXT + 1, device)
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        qkv = torch.randn(rows, width, device=device).to(torch.bfloat16)
        rope = RopeTables(config, CONTEXT + 1, device).upto(CONTEXT + 1)

        def attend(layer: Layer) -> None:
            engine.ops.attend(qkv, layer, batch, rope, engine.arena)

        layers = [attention_layer(config, decoder.kv, i, device) for i in range(config.layers)]
        return self.machine.chain_s([partial(attend, one) for one in layers]) * config.layers


def _room(config: ModelConfig) -> int:
    """Bytes from a model's first to its last."""
    return place_tensors(plan_layout(config), 0)[1]


def buffer_bytes(config: ModelConfig) -> int:
    """For two models that overlap."""
    return -(-_room(config) // _ALIGNMENT) * _ALIGNMENT + 2 * _ALIGNMENT


def _shuffles(names: Sequence[str], count: int) -> Iterator[list[str]]:
    """All names in some order, again and again, `count` in all, none twice in a row."""
    rng, last = random.Random(3), ""
    for _ in range(-(-count // len(names))):
        turns = rng.sample(names, len(names))
        if turns[0] == last:
            turns.reverse()
        last = turns[-1]
        yield turns


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
