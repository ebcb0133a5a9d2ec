"""A GPU slice that swaps weights, as a worker runs it: policy, engine, two steps at a time."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from engine_case import COMMON, LateModel
from tiny import make_model

from c2cserve.core.actions import Fetch, Release, RunStep
from c2cserve.core.events import Activated, Deactivated, Fetched, SliceEvent, Submitted
from c2cserve.core.machine import GpuShare, Slice
from c2cserve.core.model import ModelSpec
from c2cserve.core.policy_names import OWN
from c2cserve.core.request import Delta, Job, Request, Sampling, Slo
from c2cserve.engine.gpu.setup import GpuParts
from c2cserve.engine.models.config import read_config
from c2cserve.policy.by_name import hybrid_alpha, slice_policy
from c2cserve.runtime.slice_stats import SliceStats
from c2cserve.serving.worker.engine_host import WorkerEngine

GREEDY = Sampling(seed=0, temperature=0.0)
SLAB_BYTES = 2 << 20
LARGE: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "num_hidden_layers": 2,
}  # fmt: skip
"""Two layers of Llama-3-8B: 0.9 GB."""


def make_seeded(folder: Path, seed: int, fields: dict[str, Any]) -> Path:
    """A Llama checkpoint with random weights of its own."""
    folder.mkdir()
    make_model(folder, "Llama", {**COMMON, **fields}, seed, torch.bfloat16, spread=0.05)
    return folder


class SwappingSlice:
    """All actions of the policy are carried out, all events come back to it."""

    def __init__(
        self, hbm_bytes: int, *, swaps: bool = True, lanes: int = 1, policy: str = OWN,
        max_step_tokens: int = 32,
    ) -> None:  # fmt: skip
        """Without `swaps` the link is not known, and weights are cached as they stream by."""
        properties = torch.cuda.get_device_properties(0)
        share = GpuShare(f"GPU-{properties.uuid}", 0, profile="assumed")
        kv_bytes = hbm_bytes // SLAB_BYTES * SLAB_BYTES
        slice_ = Slice(
            "s", "gpu", cpus=(0, 1), kv_bytes=kv_bytes, slab_bytes=SLAB_BYTES, max_batch=64,
            max_step_tokens=max_step_tokens, gpu=share, hbm_bytes=kv_bytes, link="link",
            link_bytes_per_s=50e9 if swaps else 0.0, lanes=lanes,
        )  # fmt: skip
        self.events: list[SliceEvent] = []
        self.deltas: list[Delta] = []
        self.fetched: list[Fetched] = []
        self.loaded: list[str] = []
        """Models in the order of their `Fetch`."""
        self.dropped: list[str] = []
        self.lanes: dict[str, set[str]] = {}
        """Model -> the lanes in which it has had steps."""
        world = SimpleNamespace(report=self._report, notify=lambda: None)
        self.policy = slice_policy(policy, slice_, 2)
        alpha = hybrid_alpha(policy)
        self.engine = WorkerEngine(slice_, cast("Any", world), hybrid_alpha=alpha)
        self.specs: dict[str, ModelSpec] = {}
        self._models: dict[str, LateModel] = {}

    @property
    def gpu(self) -> GpuParts:
        return cast("Any", self.engine)._backend._gpu

    @property
    def stats(self) -> SliceStats:
        self.engine.poll()
        return self.engine.stats

    def _report(self, event: SliceEvent | None, deltas: Sequence[Delta]) -> None:
        self.deltas += deltas
        if event is not None:
            self.events.append(event)

    def attach(self, name: str, folder: Path, *, keep: bool = True) -> ModelSpec:
        model = self._models.get(name)
        if model is None:  # each model has a segment of its own, also of a shared checkpoint
            model = self._models[name] = LateModel(folder, 1024).load_all()
        spec = ModelSpec(
            name, model.path.stat().st_size, model.config.layers, model.decoder.kv.block_bytes, 1024
        )
        self.engine.attach(spec, str(model.path), read_config(folder), "auto")
        self.specs[name] = spec
        self.events.append(Activated(spec, keep))
        return spec

    def detach(self, name: str) -> None:
        self.engine.submit(Release(name))
        self.events.append(Deactivated(name))
        del self.specs[name]
        self.tick()
        self.engine.detach(name)

    def submit(self, name: str, model: str, prompt: list[int], new: int) -> None:
        request = Request(name, model, len(prompt), new, time.monotonic(), Slo(60.0, 60.0))
        chained = self.engine.add(Job(request, tuple(prompt), GREEDY))
        self.events.append(Submitted(request, chained))

    def tick(self) -> None:
        self.engine.poll()
        events, self.events[:] = list(self.events), []
        for event in events:
            if isinstance(event, Fetched):
                self.fetched.append(event)
            self.policy.apply(event)
        for action in self.policy.decide(time.monotonic()):
            if isinstance(action, Fetch):
                self.loaded.append(action.model)
            elif isinstance(action, Release):
                self.dropped.append(action.model)
            elif isinstance(action, RunStep):
                self.lanes.setdefault(action.step.model, set()).add(action.step.lane)
            self.engine.submit(cast("Any", action))

    def finish(self, *names: str, limit_s: float = 120.0) -> None:
        """Run until these requests have ended and nothing is in flight."""
        end_s = time.monotonic() + limit_s
        while not set(names) <= {one.request_id for one in self.deltas if one.finish}:
            self.tick()
            assert time.monotonic() < end_s, "the slice is stuck"
        self.settle()

    def settle(self) -> None:
        for _ in range(3):
            self.gpu.finish()
            self.tick()

    def tokens(self, name: str) -> list[int]:
        return [t for one in self.deltas if one.request_id == name for t in one.tokens]

    def close(self) -> None:
        self.settle()
        for name in list(self.specs):
            self.detach(name)
