"""The checkpoints of `weights_mix.py`, and whether they and the pool have room on this machine."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from catalogue_files import Pick, write_catalogue
from gpu_models import weight_bytes
from host_memory import grow_memory, memory_bytes
from mix_load import SLO
from mix_machine import Refused

POOL_SLACK = 128 << 20
"""What the pool is given beyond the models."""
_OWN_SHARE = 0.02
"""A model's own file, about: one matrix of its 28 or more layers."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Models of a shape share one large file, so 80 GB of models take 23 GB."""

    folder: Path
    pool_dir: Path
    made: Pick
    beside_bytes: int
    """Host memory that is needed beside checkpoints and pool."""

    @property
    def _catalog(self) -> Path:
        """The last file that is written: where it is, all others are."""
        return self.folder / "catalog.toml"

    @property
    def _new_bytes(self) -> int:
        if self._catalog.is_file():
            return 0
        sizes = [weight_bytes(shape, layers) for shape, layers in self.made.shapes.items()]
        return sum(sizes) + int(self.made.bytes * _OWN_SHARE)

    def check_room(self, memory_gib: float | None) -> None:
        """Check the memory, and the folders of checkpoints and pool. `memory_gib` is what host
        memory may become where it grows with use; it is used for a moment. Raises Refused."""
        pool_bytes, new_bytes = self.made.bytes + POOL_SLACK, self._new_bytes
        folder = next(one for one in (self.folder, *self.folder.parents) if one.is_dir())
        together = folder.stat().st_dev == self.pool_dir.stat().st_dev
        both = pool_bytes + new_bytes
        in_memory = self.beside_bytes + (both if together else pool_bytes)
        memory = memory_bytes()["MemAvailable"]
        if memory_gib is not None:
            memory = int(memory_gib * (1 << 30))
        _check("host memory", memory, in_memory)
        for path, size in ((self.pool_dir, pool_bytes), (folder, new_bytes)):
            _check(str(path), shutil.disk_usage(path).free, both if together else size)
        if memory_gib is not None:
            _check("host memory", grow_memory(in_memory), in_memory)

    def written(self) -> Path:
        """Return the catalogue's file. Write what an earlier run has not left. Raises OSError."""
        if not self._catalog.is_file():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            write_catalogue(self.folder, self.made, SLO.ttft_s, SLO.tpot_s)
        return self._catalog


def _check(what: str, free: int, needed: int) -> None:
    if free < needed:
        raise Refused(
            f"{what}: {needed / 1e9:.1f} GB are needed for checkpoints, pool and paused requests,"
            f" {free / 1e9:.1f} GB are free"
        )
