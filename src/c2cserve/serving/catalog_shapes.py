"""A server's own catalogue as models to simulate: their sizes, from their checkpoints."""

from pathlib import Path

from c2cserve.catalog.entry import CatalogEntry, CatalogError
from c2cserve.catalog.file import load_catalog
from c2cserve.core.model import ModelSpec
from c2cserve.core.tensors import ITEM_BYTES
from c2cserve.engine.models.config import ConfigError, ModelConfig, parse_config, read_config
from c2cserve.engine.models.layout import plan_layout
from c2cserve.memory.checkpoint import CheckpointError, find_files, read_header
from c2cserve.memory.segment import segment_bytes
from c2cserve.sim.world.shapes import Shape, SimModel, catalogue, interleaved
from c2cserve.terminal.output import CliError


def find_models(catalog: str) -> list[SimModel]:
    """Return the models of `SHAPE*COUNT,...` or of a server's catalogue file (TOML). Raises
    ValueError, CliError."""
    if not catalog.endswith(".toml"):
        return interleaved(catalogue(catalog))
    try:
        return [_model(entry) for entry in load_catalog(Path(catalog))]
    except CatalogError as error:
        raise CliError(str(error), 2) from error


def _model(entry: CatalogEntry) -> SimModel:
    if entry.path is None:
        raise CliError(
            f"model {entry.id}: only checkpoints in directories can be measured, and {entry.hub} "
            "is on a hub: download it and set path",
            2,
        )
    try:
        config = parse_config(read_config(entry.path), entry.dtype)
        names = frozenset(name for file in find_files(entry.path) for name in read_header(file))
        weight_bytes = segment_bytes(plan_layout(config, names))
    except (ConfigError, CheckpointError) as error:
        raise CliError(f"model {entry.id}: {error}", 2) from error
    item_bytes = ITEM_BYTES[config.dtype]
    shape = _shape(entry.id, config, weight_bytes // item_bytes, item_bytes)
    spec = ModelSpec(
        id=entry.id,
        weight_bytes=weight_bytes,
        layers=config.layers,
        kv_block_bytes=config.kv_block_bytes,
        max_context=min(entry.max_context or config.max_position, config.max_position),
        slo=entry.slo,
        priority=entry.priority,
        pinned=entry.pinned,
        keep_warm_s=entry.keep_warm_s,
        parameters=shape.parameters,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        expert_bytes=shape.expert_parameters * item_bytes,
    )
    return SimModel(spec, shape)


def _shape(name: str, config: ModelConfig, parameters: int, item_bytes: int) -> Shape:
    """Return the model's shape. Measured step times, if there are any, go by the model's name."""
    moe = config.moe
    sparse = sum(config.sparse(layer) for layer in range(config.layers))
    return Shape(
        name=name,
        parameters=parameters,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_context=config.max_position,
        experts=0 if moe is None else moe.experts,
        experts_per_token=0 if moe is None else moe.per_token,
        expert_parameters=0 if moe is None else 3 * config.hidden * moe.intermediate * sparse,
        table=name,
        item_bytes=item_bytes,
        vocabulary_parameters=config.vocab * config.hidden,
        tied=config.tied,
    )
