"""Timing of `attention.py`: one layer's attention as a step has it, in a chain of layers whose keys
and values are nowhere near, ours and others over the same arena."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from attention_cases import (
    Case,
    block_offsets,
    error,
    floor,
    flops,
    kv_bytes,
    kv_pages,
    page_unit,
    pages_of,
    reference,
    token_rows,
    unit_heads,
    watched_tokens,
)
from attention_peer import FlashInfer, Peer, plan_copies, planning
from gpu_engine_run import attention_layer
from torch import Tensor

from c2cserve.engine.models.config import ModelConfig
from c2cserve.kernels.gpu.attention import paged as attention
from c2cserve.kernels.gpu.gemm.measure import Step, capture
from c2cserve.kernels.layer import KvLayout, Layer, TokenRows

SPAN_BYTES = 16 << 20
"""Of an arena, that one model has at a time: what slices of a GPU take."""
LAYERS_DECODE, LAYERS_PREFILL = 16, 4
"""In a chain, at most."""
TOLERANCE = 0.02
"""Between results of values near 1 in bfloat16, whose weights were rounded to bfloat16 too."""
_FLUSHED_BYTES = 512 << 20
_WARM = 3
_PIECE_HEADS = 1 << 18
REFUSALS = (RuntimeError, ValueError, LookupError, OSError, AssertionError)
"""What another system may fail with."""

Timer = Callable[[Sequence[Step]], list[float]]
"""Seconds of one of the steps, all run one after another, of every repeat."""


class GraphTimer:
    """Replays of a graph, timed by events. Before each one, more than the L2 holds is read."""

    def __init__(self, context: Any, device: torch.device, repeats: int) -> None:
        self._context, self._repeats = context, repeats
        self._flushed = torch.zeros(_FLUSHED_BYTES // 4, dtype=torch.float32, device=device)

    def __call__(self, steps: Sequence[Step]) -> list[float]:
        stream = torch.cuda.current_stream()
        graph = capture(self._context, stream, steps)
        times: list[float] = []
        for _ in range(_WARM + self._repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flushed.sum()
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(steps))
        return times[_WARM:]


def fill(arena: Tensor, head_dim: int) -> None:
    """The whole arena with heads of mean square 1, repeating."""
    piece = unit_heads(_PIECE_HEADS, head_dim, arena.device, seed=5).view(-1)
    numbers = arena.view(torch.bfloat16)
    for start in range(0, numbers.numel(), piece.numel()):
        part = numbers[start : start + piece.numel()]
        part.copy_(piece[: part.numel()])


class Bench:
    """Cases of one shape of model, over one arena."""

    def __init__(
        self, machine: Any, config: ModelConfig, limits: dict[str, Any], timer: Timer,
        peer: FlashInfer | None,
    ) -> None:  # fmt: skip
        """`machine`: `gpu_machine.Gpu`; its arena is filled."""
        self._machine, self._limits, self._timer, self._peer = machine, limits, timer, peer
        self._device: torch.device = machine.device
        self._arena: Tensor = machine.arena
        self._heads = config.heads
        self.kv = KvLayout(config.layers, config.kv_heads, config.head_dim, "bfloat16")
        self._unit = page_unit(self.kv.block_bytes, SPAN_BYTES)
        self._layers = [
            attention_layer(config, self.kv, i, self._device) for i in range(config.layers)
        ]
        self._arrivals = attention.Arrivals(self._device)

    def measure(self, case: Case) -> dict[str, Any]:
        """Times and errors of a batch, `ours` and of each of `peers`; seconds of one layer."""
        batch = _Batch(self, case)
        hbm, peak = self._limits["hbm_bytes_per_s"], self._limits["matmul_flops"]
        floor_s, bound = floor(case, self.kv, self._heads, hbm, peak)
        row: dict[str, Any] = {
            "case": case.name, "new": case.new, "context": case.context, "floor_s": floor_s,
            "bound": bound, "kv_bytes": kv_bytes(case, self.kv),
            "flops": flops(case, self._heads, self.kv.head_dim), "layers": len(batch.layers),
            "page_unit_bytes": self._unit, "ours": batch.ours(), "peers": {},
        }  # fmt: skip
        for one in self._peers(case):
            try:
                row["peers"][one.name] = batch.other(one)
            except REFUSALS as failed:
                row["peers"][one.name] = {"refused": f"{type(failed).__name__}: {failed}"}
        found = [row["ours"], *row["peers"].values()]
        errors = [one.get(kind, 0.0) for one in found for kind in ("error", "from_ours")]
        row["agrees"] = max(errors) <= TOLERANCE
        return row

    def count_copies(self, case: Case, row: dict[str, Any]) -> None:
        """Of others' plans, into what `measure` returned. After all that is timed."""
        for one in self._peers(case):
            if "seconds" in row["peers"][one.name]:
                copied = plan_copies(one, self._machine.synchronize)
                row["peers"][one.name]["plan_copies"] = copied

    def _peers(self, case: Case) -> Iterator[Peer]:
        if self._peer is not None:
            rows = token_rows(case, self.offsets(case))
            yield from self._peer.peers(case, pages_of(rows, self._unit), self._heads, self.kv)

    def offsets(self, case: Case) -> list[int]:
        """Blocks of a case, always the same."""
        return block_offsets(case.blocks, self.kv.block_bytes, SPAN_BYTES)


class _Batch:
    """A case's operands on the GPU. Rotation is by nothing (cos 1, sin 0) and heads come normed, so
    that a step can be repeated in place and all systems see the same bits."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self._bench, self._case = bench, case
        kv, device = bench.kv, bench._device
        self.host_rows = token_rows(case, bench.offsets(case))
        self._rows = _moved(self.host_rows, device)
        length = max(case.context)
        self._rope = tuple(
            torch.full((length, kv.head_dim // 2), value, dtype=torch.float32, device=device)
            for value in (1.0, 0.0)
        )
        heads = bench._heads + 2 * kv.kv_heads
        drawn = unit_heads(case.tokens * heads, kv.head_dim, device, seed=9)
        self._qkv = drawn.view(case.tokens, heads * kv.head_dim)
        most = LAYERS_DECODE if case.decodes == len(case.new) else LAYERS_PREFILL
        count = min(most, kv.layers)
        self.layers = [bench._layers[i * kv.layers // count] for i in range(count)]
        self._pages = [kv_pages(bench._arena, kv, one.index, bench._unit) for one in self.layers]
        self._out = torch.empty(
            case.tokens, bench._heads, kv.head_dim, dtype=torch.bfloat16, device=device
        )
        self._ours: Tensor | None = None

    @property
    def _q(self) -> Tensor:
        whole = self._qkv.view(len(self._qkv), -1, self._bench.kv.head_dim)
        return whole[:, : self._bench._heads]

    # ---- ours -----------------------------------------------------------------------------------

    def ours(self) -> dict[str, Any]:
        """`Ops.attend`, which stores new keys and values in all of the chain's layers: first."""
        steps = [partial(self._attend, one) for one in self.layers]
        results = [step() for step in steps]
        self._ours = results[0].view(self._out.shape)
        found = self._timed(steps) | {"error": self._error(self._ours)}
        if self._case.decodes == 0:
            alone = [partial(self._attend_only, one) for one in self.layers]
            times = self._bench._timer(alone)
            found |= {"attention_s": median(times), "attention_times_s": times}
        return found

    def _attend(self, layer: Layer) -> Tensor:
        return attention.attend(
            self._qkv, layer, self._rows, self._rope, self._bench._arena, self._bench._arrivals
        )

    def _attend_only(self, layer: Layer) -> None:
        """Without rotating and storing, as it follows on `rope_store`."""
        attention._attend_many(
            self._qkv, layer, self._rows, self._bench._arena, self._out.view(len(self._qkv), -1),
            self._bench._heads,
        )  # fmt: skip

    # ---- others ---------------------------------------------------------------------------------

    def other(self, peer: Peer) -> dict[str, Any]:
        found = planning(peer, self._bench._machine.synchronize)
        peer.plan()  # the graph knows the addresses of the last
        steps = [partial(peer.run, self._q, keys, values, self._out)
                 for keys, values in self._pages]  # fmt: skip
        self._out.zero_()
        steps[0]()
        assert self._ours is not None, "ours is the first"
        found |= {"error": self._error(self._out), "from_ours": error(self._out, self._ours)}
        return found | self._timed(steps)

    # ---- what both are measured by --------------------------------------------------------------

    def _timed(self, steps: Sequence[Step]) -> dict[str, Any]:
        synchronize = self._bench._machine.synchronize
        hosts: list[float] = []
        for _ in range(5):
            synchronize()
            begin_s = perf_counter()
            for step in steps:
                step()
            hosts.append((perf_counter() - begin_s) / len(steps))
        synchronize()
        times = self._bench._timer(steps)
        return {"seconds": median(times), "times_s": times, "launch_host_s": median(hosts)}

    def _error(self, out: Tensor) -> float:
        keys, values = self._pages[0]
        table = pages_of(self.host_rows, self._bench._unit)
        worst = 0.0
        for row, seq, seen in watched_tokens(self._case):
            numbers = table.numbers[int(table.starts[seq]) : int(table.starts[seq + 1])]
            scale = self.layers[0].shape.scale
            right = reference(self._q[row], keys, values, numbers, seen, scale)
            worst = max(worst, error(out[row], right))
        return worst


def _moved(rows: TokenRows, device: torch.device) -> TokenRows:
    return TokenRows(
        rows.positions.to(device), rows.q_start.to(device), rows.context_len.to(device),
        rows.block_table.to(device), rows.slots.to(device),
    )  # fmt: skip
