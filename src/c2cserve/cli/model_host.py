"""The models of a server: catalogue entries, their files, their layouts, the pool.

Joins what may not know each other: the catalogue, the engine's layouts and the weight pool.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from c2cserve.catalog.entry import CatalogEntry, CatalogError
from c2cserve.catalog.hub import fetch
from c2cserve.catalog.parse import parse_entry
from c2cserve.core.events import ClusterEvent, ModelFailed, ModelLoaded, ModelUsable
from c2cserve.core.model import ModelSpec
from c2cserve.engine.models.config import ConfigError, ModelConfig, parse_config, read_config
from c2cserve.engine.models.layout import plan_layout
from c2cserve.memory.checkpoint import (
    CheckpointError,
    TensorSource,
    find_files,
    open_checkpoint,
    read_header,
)
from c2cserve.memory.layout import LayoutPlan
from c2cserve.memory.pool import Listener, Pool, PoolError
from c2cserve.memory.segment import segment_bytes
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.runtime.live.host import HostedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Files:
    plan: LayoutPlan
    sources: dict[str, TensorSource]


class CatalogHost:
    """`runtime.live.host.ModelHost`."""

    def __init__(
        self,
        base_dir: Path,
        make_pool: Callable[[Listener], Pool],
        post: Callable[[ClusterEvent], None],
    ) -> None:
        """`base_dir`: what relative paths of entries start from. `post` takes the pool's news."""
        self._base_dir = base_dir
        self._post = post
        self._files: dict[str, _Files] = {}
        listener = Listener(
            usable=lambda model: self._post(ModelUsable(model)),
            loaded=lambda model, size, took_s: self._post(ModelLoaded(model, size, took_s)),
            failed=lambda model, reason: self._post(ModelFailed(model, reason)),
        )
        self._pool = make_pool(listener)

    def prepare(self, entry: dict[str, object]) -> HostedModel:
        try:
            parsed = parse_entry(entry, self._base_dir)
            directory = fetch(parsed) if parsed.path is None else parsed.path
            raw = read_config(directory)
            config = parse_config(raw, parsed.dtype)
            names = frozenset(name for file in find_files(directory) for name in read_header(file))
            plan = plan_layout(config, names)
            sources = open_checkpoint(directory, plan)
        except (CatalogError, ConfigError, CheckpointError) as error:
            raise Refused(400, f"model {entry.get('id', '?')}: {error}") from error
        self._files[parsed.id] = _Files(plan, sources)
        return _hosted(entry, parsed, directory, raw, config, segment_bytes(plan))

    def load(self, model: HostedModel) -> None:
        name = model.spec.id
        files = self._files[name]
        try:
            self._pool.load(name, files.plan, files.sources)
        except PoolError as error:
            self._post(ModelFailed(name, str(error)))

    def segment(self, model: str) -> str:
        return str(self._pool.path(model))

    def evict(self, model: str) -> None:
        self._pool.evict(model)

    def loaded_bytes(self, model: str) -> int:
        return self._pool.loaded_bytes(model)

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    @property
    def budget_bytes(self) -> int:
        return self._pool.budget_bytes

    def close(self) -> None:
        self._pool.close()


def _hosted(
    entry: dict[str, object],
    parsed: CatalogEntry,
    directory: Path,
    raw: dict[str, object],
    config: ModelConfig,
    weight_bytes: int,
) -> HostedModel:
    max_context = parsed.max_context or config.max_position
    if max_context > config.max_position:
        raise Refused(
            400,
            f"model {parsed.id}: max_context {max_context} is more than the model's own "
            f"{config.max_position}",
        )
    spec = ModelSpec(
        id=parsed.id,
        weight_bytes=weight_bytes,
        layers=config.layers,
        kv_block_bytes=config.kv_block_bytes,
        max_context=max_context,
        slo=parsed.slo,
        priority=parsed.priority,
        pinned=parsed.pinned,
        keep_warm_s=parsed.keep_warm_s,
    )
    files = ModelFiles(
        id=parsed.id,
        path=str(directory),
        max_context=max_context,
        vocab_size=config.vocab,
        eos_token_ids=config.eos_token_ids,
        ttft_s=parsed.slo.ttft_s,
        tpot_s=parsed.slo.tpot_s,
        priority=parsed.priority,
    )
    return HostedModel(spec, files, parsed.aliases, raw, config.dtype, entry)
