"""The directories for models that an administrator adds while the server runs.

The operator writes the catalogue's file, so its entries may lie anywhere. An entry from the admin
API must lie under a root. Otherwise the admin key could read any file that the server's user may
read, at least through error messages.

Paths are compared after all links are resolved. A file in a checkpoint is judged by the real place
of its open descriptor (`files.seal.FileSeal.real`): replacing a link after the check has no effect.
"""

from collections.abc import Iterable
from pathlib import Path

from c2cserve.catalog.entry import CatalogError
from c2cserve.catalog.file import Catalog
from c2cserve.catalog.hub import cache_dir
from c2cserve.files.reading import one_line
from c2cserve.files.seal import Seal

_SNAPSHOTS = "snapshots"


class ModelRoots:
    """Directories under which added models lie."""

    def __init__(self, roots: Iterable[Path], trusted: Iterable[dict[str, object]] = ()) -> None:
        """`trusted`: entries that may lie anywhere."""
        self._roots = tuple(root.resolve() for root in roots)
        self._trusted = tuple(trusted)

    def trusts(self, entry: dict[str, object]) -> bool:
        return entry in self._trusted

    def check_path(self, given: object, path: Path) -> None:
        """Raise CatalogError unless the resolved `path` lies under a root. The error does not
        reveal what exists elsewhere."""
        if not self._holds(path):
            raise CatalogError(
                f"path {one_line(given)} is outside the model roots: the catalogue's directory, "
                "those of its models, and what --model-root names"
            )

    def check_files(self, seal: Seal) -> None:
        """Raise CatalogError if a link leads from a checkpoint to a file outside the roots."""
        for name, file in seal.files.items():
            if file is not None and not self._holds(file.real):
                raise CatalogError(
                    f"{name.name} is a link that leads out of the model roots (--model-root)"
                )

    def with_hub(self) -> "ModelRoots":
        """Return these roots and the hub's cache, where downloaded checkpoints link to."""
        return ModelRoots([*self._roots, cache_dir()])

    def _holds(self, path: Path) -> bool:
        return any(path.is_relative_to(root) for root in self._roots)


def roots_of(catalog: Catalog, more: Iterable[Path]) -> ModelRoots:
    """Return the roots of a server: the directories of its catalogue, of the catalogue's models,
    and `more`."""
    named = [entry.path for entry in catalog if entry.path is not None]
    return ModelRoots([catalog.base_dir, *map(_root_of, named), *more], catalog.raw)


def _root_of(checkpoint: Path) -> Path:
    """Return the root of a checkpoint. A snapshot in a hub's cache links to the blobs beside it, so
    its root is the repository."""
    if checkpoint.parent.name == _SNAPSHOTS:
        return checkpoint.parent.parent
    return checkpoint
