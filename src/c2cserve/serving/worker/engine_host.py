"""The worker's engine half. Importing this module imports torch; the server never does."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from c2cserve.core.actions import (
    BringPrefix,
    EngineAction,
    Fetch,
    Move,
    Release,
    RunStep,
    SetAlpha,
)
from c2cserve.core.events import ChunksProfiled, Fetched
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.request import Job
from c2cserve.core.step import Step
from c2cserve.engine.executor import Executor
from c2cserve.engine.guides import Guides
from c2cserve.engine.models.config import ModelConfig, parse_config
from c2cserve.engine.models.decoder import Decoder
from c2cserve.engine.weights import Weights
from c2cserve.grammars.outputs import Grammars
from c2cserve.kernels.cpu_ops import CpuOps
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.worker.backends import Backend, CpuBackend
from c2cserve.serving.worker.executor_stats import kv_stats, step_stats
from c2cserve.serving.worker.hybrid_steps import HybridSteps, SliceRates
from c2cserve.serving.worker.shared_gpu import SharedGpu
from c2cserve.serving.worker.slice_engine import EngineState, Unusable
from c2cserve.serving.worker.world import WorkerWorld

if TYPE_CHECKING:
    from c2cserve.engine.gpu.setup import GpuParts
    from c2cserve.kernels.gpu.gemm.weight import WeightHandle

log = logging.getLogger(__name__)

_ATTACH_LOGGED_S = 0.25
"""Models that take longer to attach are logged. Clients of other models notice it."""
_SAMPLER_THREADS = 4
"""Threads of a GPU slice for rows that its GPU does not sample itself."""


class _GpuBackend:
    """A GPU slice: weights are mapped and registered once per process. They are loaded into HBM by
    policy, or cached there when used."""

    def __init__(
        self, slice_: Slice, share: GpuShare, world: WorkerWorld, shared: "SharedGpu",
        hybrid_alpha: float | None,
    ) -> None:  # fmt: skip
        """Open the slice's part of the GPU for the calling thread. Raises `NoEngine`."""
        from c2cserve.engine.gpu.segments import Registering

        sampler = CpuOps(min(_SAMPLER_THREADS, len(slice_.cpus)))
        self._gpu = gpu = shared.open(slice_, share, sampler, world.notify, hybrid_alpha)
        self._id, self._most_tokens = slice_.id, slice_.max_step_tokens
        self._shared = shared
        self._report, self._notify = world.report, world.notify
        report = world.report
        self._hybrid: HybridSteps | None = None
        if gpu.hybrid is not None:
            self._hybrid = HybridSteps(slice_.id, _rates(gpu), shared.link_use, world.report)
            report = self._hybrid.report
        self._names: dict[str, str] = {}
        """Model -> the name of its segment."""
        self._registering = Registering()
        self.device = gpu.device
        self.isa = f"{torch.cuda.get_device_name(gpu.device)}, {gpu.context.sms} SMs"
        self.guides = Guides(world.notify, Grammars(gpu.masks))
        self.executor = Executor(
            slice_.id, gpu.ops, gpu.arena, report, time.monotonic,
            to_device=gpu.to_device, fatal=gpu.fatal, renew=gpu.renew, host_kv=gpu.host_kv,
            timer=gpu.timer,
            streaming=None if gpu.streaming is None else gpu.streaming.parts,
            moved=gpu.moved,
            guides=self.guides,
            arrived=gpu.arrived,
        )  # fmt: skip
        gpu.fence.reading = self.executor.lanes_in_flight

    def warm(self, config: ModelConfig) -> None:
        self._gpu.warm(config)

    def open(self, spec: ModelSpec, path: Path, config: ModelConfig) -> Weights:
        model = spec.id
        pinned = self._shared.segments.begin(path)
        self._registering.add(model, pinned)
        self._names[model] = path.name
        self._refresh_peers()  # an older view may confuse the segment's addresses with another's
        if self._gpu.cache is not None:
            data = pinned.segment.data
            self._gpu.cache.add(model, data.ctypes.data, data.nbytes)
        if self._hybrid is not None:
            self._hybrid.attached(spec)
            chunks = self._gpu.chunk_costs(config, self._most_tokens)
            self._report(ChunksProfiled(model, chunks), ())
        return Weights(pinned.segment, pinned)

    def close(self, model: str, path: Path) -> None:
        if self._gpu.loads is not None:
            self._gpu.loads.release(model)
        self._gpu.finish()
        if self._gpu.cache is not None:
            self._gpu.cache.forget(model)
        if self._gpu.hybrid is not None:
            self._gpu.hybrid.forget(model)
        del self._names[model]
        self._registering.remove(model)
        self._shared.segments.close(path)

    def unusable(self) -> Sequence[tuple[str, str]]:
        return self._registering.faults()

    def begin(self, step: Step) -> None:
        if self._hybrid is not None:
            self._hybrid.begin(step)
        streaming = self._shared.streaming
        streaming.add(self._id)
        for linear in self._gpu.linears:
            linear.neighbours = len(streaming) - 1
        peers = self._gpu.peers
        if peers is not None and step.model in self._names:
            peers.refresh()
            peers.pool.used(self._names[step.model])
        loads = self._gpu.loads
        if loads is None or loads.over_link(step.model):
            self._shared.note_steps(self._id, over_link=True)
        if loads is not None:
            loads.make_room(step.kv_end_bytes)
        if self._gpu.cache is not None:
            self._gpu.cache.begin_step(step.model, time.monotonic(), step.kv_end_bytes)

    def polled(self, *, computing: bool) -> None:
        self._refresh_peers()
        if self._gpu.loads is not None:
            for one in self._gpu.loads.poll():
                self._report(Fetched(one.model, one.took_s, one.refused), ())
        if not computing:
            self._shared.streaming.discard(self._id)
            self._shared.note_steps(self._id, over_link=False)
            if self._hybrid is not None:
                self._hybrid.rests()
        if self._gpu.first_uses.go_on(idle=not len(self.executor)):
            self._notify()  # poll again at once, but take messages before

    def fetch(self, fetch: Fetch, decoder: Decoder | None) -> None:
        loads = self._gpu.loads
        assert loads is not None, f"{fetch.model}: this slice swaps no weights"
        loads.fetch(fetch.model, partial(self._matrices, fetch.model, decoder), fetch.kv_end_bytes)

    def _matrices(self, model: str, decoder: Decoder | None) -> "list[list[WeightHandle]] | None":
        from c2cserve.engine.gpu.tables import matrices_by_layer

        if decoder is None:
            raise LookupError(f"{model} is not attached to this slice")
        prepared = decoder.prepared(self._gpu.ops)
        if prepared is None:
            return None
        if self._gpu.streaming is not None:  # it may have to stream after all
            self._gpu.streaming.parts.attached()
        return matrices_by_layer(*prepared, self._gpu.device)

    def release(self, model: str) -> None:
        if self._gpu.loads is not None:
            self._gpu.loads.release(model)

    def set_alpha(self, model: str, alpha: float) -> None:
        assert self._gpu.hybrid is not None, f"{model}: this slice has no hybrid GEMMs"
        self._gpu.hybrid.set_alpha(model, alpha)

    @property
    def waiting(self) -> bool:
        return self._gpu.loads is not None and self._gpu.loads.waiting

    def make_room(self, kv_end_bytes: int | None) -> None:
        if self._gpu.loads is not None:
            self._gpu.loads.make_room(kv_end_bytes)
        if self._gpu.cache is not None:
            self._gpu.cache.make_room(kv_end_bytes)

    def _refresh_peers(self) -> None:
        if self._gpu.peers is not None:
            self._gpu.peers.refresh()

    @property
    def stats(self) -> SliceStats:
        cache, graphs, flashes = self._gpu.cache, self._gpu.graphs, self._gpu.flashes
        steps = SliceStats(
            graph_steps=sum(one.replays for one in graphs),
            graph_captures=sum(one.captures for one in graphs),
            graph_capture_failures=sum(one.failures for one in graphs),
            graphs_dropped=sum(one.dropped for one in graphs),
            flash_steps=sum(one.steps for one in flashes),
            flash_missed_steps=sum(one.missed for one in flashes),
            gemms_warmed=self._gpu.first_uses.done,
            gemm_warm_seconds=self._gpu.first_uses.seconds,
        )
        steps = self._shared.with_transfers(steps, self._id)
        if cache is None:
            return steps
        moved, peers = self._gpu.moved(), self._gpu.peers
        if self._gpu.loads is not None:
            loads = self._gpu.loads.counts
            steps = replace(
                steps, weight_fetches=loads.fetches, weight_fetched_bytes=loads.copied_bytes,
                weight_fetch_seconds=loads.seconds, weight_releases=loads.releases,
                weight_fetches_cancelled=loads.cancelled, weight_fetches_refused=loads.refused,
            )  # fmt: skip
        return replace(
            steps, weights_kept_bytes=cache.bytes, weights_hit_bytes=cache.counts.hit_bytes,
            weights_streamed_bytes=moved.streamed, weights_peer_bytes=moved.peer,
            hybrid_hbm_bytes=moved.hbm,
            alpha_changes=0 if self._gpu.hybrid is None else self._gpu.hybrid.changes,
            weights_lent_bytes=0 if peers is None else peers.pool.bytes,
        )  # fmt: skip


def _rates(gpu: "GpuParts") -> SliceRates:
    """Return the rates of a slice's links and HBM."""
    peer = 0.0 if gpu.peers is None else gpu.chooser.link_bytes_per_s("peer")
    return SliceRates(gpu.chooser.link_bytes_per_s("host"), peer, gpu.hbm_bytes_per_s())


class WorkerEngine:
    """The `serving.worker.slice_engine.SliceEngine` of any kind of slice. Raises `NoEngine`."""

    def __init__(
        self, slice_: Slice, world: WorkerWorld, *, shared: "SharedGpu | None" = None,
        hybrid_alpha: float | None = None,
    ) -> None:  # fmt: skip
        """`shared`: the GPU resources that all slices in this process use. `hybrid_alpha`: GEMMs of
        a GPU slice are C2CServe's, and begin with this alpha."""
        torch.set_num_threads(1)  # the kernels have threads of their own
        torch.set_grad_enabled(False)
        share = slice_.gpu
        self._backend: Backend
        if share is None:
            self._backend = CpuBackend(slice_, world)
        else:
            self._backend = _GpuBackend(
                slice_, share, world, shared or SharedGpu(share), hybrid_alpha
            )
        self._guides = self._backend.guides
        self._executor = self._backend.executor
        self._state = self._executor.poll()
        self._paths: dict[str, Path] = {}
        self._decoders: dict[str, Decoder] = {}
        self._attaches, self._attach_s = 0, 0.0
        self.isa = self._backend.isa

    def attach(self, spec: ModelSpec, segment: str, config: dict[str, object], dtype: str) -> None:
        began_s = time.monotonic()
        parsed = parse_config(config, dtype)
        self._backend.warm(parsed)
        path = Path(segment)
        weights = self._backend.open(spec, path, parsed)
        self._paths[spec.id] = path
        decoder = Decoder(parsed, weights, spec.max_context, self._backend.device)
        self._decoders[spec.id] = decoder
        self._executor.attach(spec.id, decoder)
        took_s = time.monotonic() - began_s
        self._attaches += 1
        self._attach_s += took_s
        if took_s > _ATTACH_LOGGED_S:
            log.info("%s took %.1f s to attach: no step was planned meanwhile", spec.id, took_s)

    def detach(self, model: str) -> None:
        self._decoders.pop(model, None)
        self._executor.detach(model)
        path = self._paths.pop(model, None)
        if path is not None:
            self._backend.close(model, path)

    def prepare(self, job: Job) -> bool:
        return self._executor.prepare(job)

    def forget(self, request_id: str) -> bool:
        return self._executor.forget(request_id)

    def add(self, job: Job) -> bool:
        return self._executor.add(job)

    def submit(self, action: EngineAction) -> None:
        match action:
            case Fetch(model):
                self._backend.fetch(action, self._decoders.get(model))
            case Release(model):
                self._backend.release(model)
                self._executor.abandon(model)
            case SetAlpha(model, alpha):
                self._backend.set_alpha(model, alpha)
            case RunStep(step):
                self._backend.begin(step)
                self._executor.submit(action)
            case Move(direction="in", kv_end_bytes=end) | BringPrefix(kv_end_bytes=end):
                self._backend.make_room(end)
                self._executor.submit(action)
            case _:
                self._executor.submit(action)

    def poll(self) -> EngineState:
        state = self._state = self._executor.poll()
        self._backend.polled(computing=state.computing)
        unusable = [
            Unusable(model, str(self._paths[model]), reason)
            for model, reason in self._backend.unusable()
        ]
        return EngineState(state.parked or self._backend.waiting, state.prepared, unusable)

    @property
    def stats(self) -> SliceStats:
        state = self._state
        return replace(
            self._backend.stats, attaches=self._attaches, attach_seconds=self._attach_s,
            grammars_failed=self._guides.failed, grammar_waits=self._guides.waited,
            grammar_processes_lost=self._guides.processes_lost,
            parts_rebuilt=state.renewals, **kv_stats(self._executor),
            **step_stats(self._executor),
        )  # fmt: skip
