"""The models of a server: catalogue entries, their files, their layouts, the pool.

This module joins parts that must not import each other: the catalogue, the engine's layouts and the
weight pool.
"""

import hashlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from c2cserve.catalog.checkpoint import INDEX
from c2cserve.catalog.entry import CatalogEntry, CatalogError
from c2cserve.catalog.generation import read_defaults
from c2cserve.catalog.hub import fetch
from c2cserve.catalog.parse import check_files, parse_entry
from c2cserve.catalog.roots import ModelRoots
from c2cserve.core.events import ClusterEvent, ModelFailed, ModelLoaded, ModelUsable
from c2cserve.core.model import ModelSpec, version_id
from c2cserve.core.request import BLOCK_TOKENS, SamplingDefaults
from c2cserve.engine.models.config import ConfigError, ModelConfig, parse_config, read_config
from c2cserve.engine.models.layout import plan_layout
from c2cserve.files.reading import FileProblem, one_line
from c2cserve.files.seal import CONFIG_FILES, TOKENIZER_FILES, Seal, seal_files
from c2cserve.memory.checkpoint import (
    CheckpointError,
    TensorSource,
    find_files,
    open_checkpoint,
    read_header,
)
from c2cserve.memory.layout import LayoutPlan, PlanError
from c2cserve.memory.pool import Fetch, Listener, Pool, PoolError
from c2cserve.memory.segment import Segment, place_tensors, segment_bytes
from c2cserve.runtime.gateway import ModelFiles, Refused
from c2cserve.server.text.vocabulary import TokenizerError
from c2cserve.serving.controller.host import HostedModel
from c2cserve.serving.controller.tokenizer_probe import TokenizerProbe

log = logging.getLogger(__name__)

_WRONG = (
    CatalogError,
    CheckpointError,
    ConfigError,
    FileProblem,
    PlanError,
    TokenizerError,
    OSError,
)
"""Exceptions of reading a checkpoint that cannot be served."""
_REASON_CHARS = 2000


@dataclass(frozen=True, slots=True)
class _Prepared(HostedModel):
    """A hosted model, and what its load needs."""

    plan: LayoutPlan
    sources: dict[str, TensorSource]
    seal: Seal

    @property
    def fingerprint(self) -> bytes:
        """A digest of the layout and of the files: equal ones have equal bytes in equal places."""
        places = place_tensors(self.plan, 0)[0]
        said = [f"{name} {one.offset} {one.shape} {one.dtype}" for name, one in places.items()]
        for path, one in sorted(self.seal.files.items()):
            if one is not None and path.suffix == ".safetensors":
                said.append(f"{path.name} {one.size} {one.digest.hex()} {one.samples.hex()}")
        return hashlib.blake2b("\n".join(said).encode(), digest_size=16).digest()


def _from_nowhere(model: str, fingerprint: bytes) -> None:
    return None


@dataclass(frozen=True, slots=True)
class _Checked:
    """A checkpoint directory, read and found good."""

    directory: Path
    raw: dict[str, object]
    config: ModelConfig
    plan: LayoutPlan
    sources: dict[str, TensorSource]
    seal: Seal
    tokenizer: Seal
    """The seal of the tokenizer's files alone."""
    defaults: SamplingDefaults


class CatalogHost:
    """The `serving.controller.host.ModelHost` of a catalogue and a pool."""

    def __init__(
        self,
        base_dir: Path,
        roots: ModelRoots,
        make_pool: Callable[[Listener], Pool],
        post: Callable[[ClusterEvent], None],
        kv_bytes: int,
        defaults: SamplingDefaults | None = None,
        *,
        half_only: bool = False,
    ) -> None:
        """`base_dir`: what relative paths of entries start from. `roots`: the directories for
        checkpoints of entries that are not in the catalogue's file. `post` takes the pool's events.
        `kv_bytes`: the largest slice's KV memory. `defaults`: of all models, instead of those of
        each checkpoint. `half_only`: slices compute in bfloat16 and float16 only, as GPU slices
        do."""
        self._kv_bytes = kv_bytes
        self._half_only = half_only
        self._defaults = defaults
        self._base_dir = base_dir
        self._roots = roots
        self._post = post
        self._lock = threading.Lock()
        self._versions: Counter[str] = Counter()
        """Catalogue id -> number of versions made so far."""
        self._tokenizers = TokenizerProbe()
        self._good_tokenizers: set[tuple[bytes | int, ...]] = set()
        """Vocabulary size and file digests of the tokenizers that passed the check."""
        self._changes = 0
        listener = Listener(
            usable=lambda model: self._post(ModelUsable(model)),
            loaded=lambda model, size, took_s: self._post(ModelLoaded(model, size, took_s)),
            failed=lambda model, reason: self._post(ModelFailed(model, reason)),
        )
        self._pool = make_pool(listener)
        self._fingerprints: dict[str, bytes] = {}
        """The fingerprints of versions that were loaded."""
        self.pool_changes = 0
        """Loads and evictions so far."""
        self.fetch_from: Callable[[str, bytes], Fetch | None] = _from_nowhere
        """Catalogue id, fingerprint -> how to get weights from another pool, None if there is no
        other that is known to have them."""

    def prepare(self, entry: dict[str, object]) -> HostedModel:
        try:
            parsed = parse_entry(entry, self._base_dir)
            roots = self._roots_for(entry, parsed)
            check_files(parsed)
            directory = fetch(parsed) if parsed.path is None else parsed.path
            checked = self._check(parsed, directory, roots)
            size = self._check_size(checked)
        except _WRONG as error:
            name = one_line(entry.get("id", "?"), 200)
            raise Refused(400, f"model {name}: {one_line(error, _REASON_CHARS)}") from error
        with self._lock:
            self._versions[parsed.id] += 1
            version = version_id(parsed.id, self._versions[parsed.id])
        if self._defaults is None and (said := str(checked.defaults)):
            log.info("model %s: generation_config.json sets %s", parsed.id, said)
        check = partial(self._check_unchanged, parsed.id, checked.tokenizer)
        return _hosted(entry, parsed, checked, version, size, check, str(self._pool.prefix))

    def _roots_for(self, entry: dict[str, object], parsed: CatalogEntry) -> ModelRoots | None:
        """Return the roots that the entry's files must lie under, None for an entry of the
        catalogue's file. Raises CatalogError."""
        if self._roots.trusts(entry):
            return None
        if parsed.path is None:
            return self._roots.with_hub()
        self._roots.check_path(entry["path"], parsed.path)
        # Read before anything is sealed, to see whether this is a checkpoint.
        # (`Path.resolve` raises RuntimeError for a link to itself.)
        self._roots.check_path(INDEX, Path(os.path.realpath(parsed.path / INDEX)))
        return self._roots

    def _check(self, parsed: CatalogEntry, directory: Path, roots: ModelRoots | None) -> _Checked:
        """Read everything but the weights. Raises one of `_WRONG`."""
        tokenizer = seal_files(directory / name for name in TOKENIZER_FILES)
        sealed = Seal(tokenizer.files | seal_files(directory / n for n in CONFIG_FILES).files)
        if roots is not None:
            roots.check_files(sealed)
        raw = read_config(directory)
        defaults = read_defaults(directory) if self._defaults is None else self._defaults
        config = self._parse_config(raw, parsed)
        _check_encodable(raw)
        weights = find_files(directory)
        seal = Seal(sealed.files | seal_files(weights).files)
        if roots is not None:
            roots.check_files(seal)
        names = frozenset(name for file in weights for name in read_header(file))
        plan = plan_layout(config, names)
        sources = open_checkpoint(directory, plan)
        self._check_tokenizer(directory, config.vocab, tokenizer)
        if (what := seal.changed()) is not None:
            raise CheckpointError(f"{directory}: {what} changed while it was read; try again")
        return _Checked(directory, raw, config, plan, sources, seal, tokenizer, defaults)

    def _parse_config(self, raw: dict[str, object], parsed: CatalogEntry) -> ModelConfig:
        """Normalise a config. Where slices compute in 16 bits, float32 is refused if the entry
        asks for it. If only the checkpoint says so, weights are kept in bfloat16, as vLLM does.
        Raises ConfigError."""
        config = parse_config(raw, parsed.dtype)
        if config.dtype != "float32" or not self._half_only:
            return config
        if parsed.dtype != "auto":
            raise ConfigError(
                "dtype float32: GPU slices run bfloat16 and float16; leave `dtype` out, or set one"
                " of them"
            )
        log.info("model %s: its float32 weights are kept in bfloat16", parsed.id)
        return parse_config(raw, "bfloat16")

    def _check_tokenizer(self, directory: Path, vocab_size: int, seal: Seal) -> None:
        """Try a tokenizer, unless the same one passed before: models often share one."""
        digests = (b"" if one is None else one.digest for one in seal.files.values())
        key = (vocab_size, *digests)
        if key not in self._good_tokenizers:
            self._tokenizers.check(directory, vocab_size)
            self._good_tokenizers.add(key)

    def _check_size(self, checked: _Checked) -> int:
        """Return the bytes that the model takes in the pool. Raises CheckpointError if it can never
        run here."""
        size, block = segment_bytes(checked.plan), checked.config.kv_block_bytes
        if block > self._kv_bytes:
            raise CheckpointError(
                f"{BLOCK_TOKENS} tokens of it take {block} bytes of KV memory, and no slice has "
                f"more than {self._kv_bytes}: raise --kv-bytes or --gpu-kv-bytes"
            )
        if size > self.budget_bytes:
            raise CheckpointError(
                f"it takes {size} bytes of host memory, and the pool's budget is "
                f"{self.budget_bytes}: raise --pool-bytes, and --shm-size in a container"
            )
        return size

    def load(self, model: HostedModel) -> None:
        assert isinstance(model, _Prepared)
        version = model.spec.id
        check = partial(self._check_weights, model)
        try:
            fetch = self.fetch_from(model.spec.name, model.fingerprint)
            self._fingerprints[version] = model.fingerprint
            self.pool_changes += 1
            self._pool.load(version, model.plan, model.sources, check, fetch)
        except PoolError as error:
            self._post(ModelFailed(version, str(error)))

    def _check_weights(self, model: _Prepared) -> None:
        """Check that no file has changed. Runs on a loader's thread. Raises CheckpointError."""
        if (reason := self._changed(model.spec.name, model.seal)) is not None:
            raise CheckpointError(reason)

    def _check_unchanged(self, name: str, tokenizer: Seal) -> None:
        """Check that the tokenizer has not changed. Runs on a thread. Raises `Refused`."""
        if (reason := self._changed(name, tokenizer)) is not None:
            raise Refused(503, f"the model {name!r} cannot be served: {reason}")

    def _changed(self, name: str, seal: Seal) -> str | None:
        """Return why the files no longer match what was read of them, after logging and counting
        it; None if they match."""
        if (what := seal.changed()) is None:
            return None
        with self._lock:
            self._changes += 1
        reason = f"files changed on disk: {what}; POST /admin/models/{name}/reload reads them all"
        log.error("model %s: %s", name, reason)
        return reason

    @property
    def tables(self) -> str:
        """The beginning of the paths of vocabularies for workers."""
        return str(self._pool.prefix)

    @property
    def files_changed(self) -> int:
        return self._changes

    def whole(self, model: str, fingerprint: bytes) -> Segment | None:
        """Return the segment of a version if all of its weights are in the pool, and are these."""
        return self._pool.whole(model) if self._fingerprints.get(model) == fingerprint else None

    def segment(self, model: str) -> str | None:
        try:
            return str(self._pool.path(model))
        except KeyError:
            return None

    def evict(self, model: str) -> None:
        self._fingerprints.pop(model, None)
        self.pool_changes += 1
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
        self._tokenizers.close()
        self._pool.close()


def _check_encodable(raw: dict[str, object]) -> None:
    """Check that the config fits into a message for workers: not every JSON does. Raises
    ConfigError."""
    try:
        msgspec.msgpack.encode(raw)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"config.json holds a value out of all bounds: {error}") from error


def _hosted(
    entry: dict[str, object],
    parsed: CatalogEntry,
    checked: _Checked,
    version: str,
    weight_bytes: int,
    check_tokenizer: Callable[[], None],
    tables: str,
) -> HostedModel:
    config = checked.config
    max_context = parsed.max_context or config.max_position
    if max_context > config.max_position:
        raise Refused(
            400,
            f"model {parsed.id}: max_context {max_context} is more than the model's own "
            f"{config.max_position}",
        )
    spec = ModelSpec(
        id=version,
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
        path=str(checked.directory),
        max_context=max_context,
        vocab_size=config.vocab,
        eos_token_ids=config.eos_token_ids,
        ttft_s=parsed.slo.ttft_s,
        tpot_s=parsed.slo.tpot_s,
        priority=parsed.priority,
        version=version,
        check_tokenizer=check_tokenizer,
        defaults=checked.defaults,
        tables=tables,
    )
    return _Prepared(
        spec, files, parsed.aliases, checked.raw, config.dtype, entry,
        checked.plan, checked.sources, checked.seal,
    )  # fmt: skip
