"""Check whether a directory is a checkpoint that this server could load, by file names alone."""

from pathlib import Path
from typing import Any

from c2cserve.catalog.entry import CatalogError
from c2cserve.catalog.foreign import INSTEAD_OF_GGUF, foreign_kind
from c2cserve.files.reading import INDEX_BYTES_MAX, FileProblem, is_file, one_line, read_object

INDEX = "model.safetensors.index.json"


def check_checkpoint(path: Path) -> None:
    """Check a directory. Raises `CatalogError`, which says what is missing from it."""
    try:
        _check(path)
    except (OSError, FileProblem) as error:
        raise CatalogError(one_line(error)) from error


def _check(path: Path) -> None:
    if not path.exists():
        raise CatalogError(f"{path} does not exist: set path to a checkpoint directory")
    if path.suffix == ".gguf":
        raise CatalogError(f"{path} is a GGUF file, one of those {INSTEAD_OF_GGUF}")
    if not path.is_dir():
        raise CatalogError(f"{path} is a file: set path to the checkpoint's directory")
    if (kind := foreign_kind({one.name for one in path.iterdir()})) is not None:
        raise CatalogError(f"{path} {kind}")
    if not is_file(path / "config.json"):
        raise CatalogError(f"{path} has no config.json: it is not a Hugging Face checkpoint")
    if not any(path.glob("*.safetensors")):
        raise CatalogError(f"{path} has no .safetensors file: the download is incomplete")
    index = read_object(path / INDEX, INDEX_BYTES_MAX)
    if index is not None:
        _check_shards(path, index)


def _check_shards(path: Path, index: dict[str, Any]) -> None:
    try:
        shards = {str(name) for name in index["weight_map"].values()}
    except (KeyError, AttributeError, TypeError) as error:
        what = one_line(repr(error))
        raise CatalogError(f"{path / INDEX} is not a safetensors index: {what}") from error
    missing = sorted(name for name in shards if not is_file(path / name))
    if missing:
        raise CatalogError(
            f"{path} lacks {len(missing)} of {len(shards)} weight files"
            f" its index names, the first being {one_line(missing[0])}: download it again"
        )
