"""Is a directory a checkpoint this server could load? Looks at names only, reads no weights."""

import json
from pathlib import Path

from c2cserve.catalog.entry import CatalogError

INDEX = "model.safetensors.index.json"


def check_checkpoint(path: Path) -> None:
    """Raises `CatalogError` saying what is missing from the directory `path`."""
    if not path.exists():
        raise CatalogError(f"{path} does not exist: set path to a checkpoint directory")
    if not path.is_dir():
        raise CatalogError(f"{path} is a file: set path to the checkpoint's directory")
    if not (path / "config.json").is_file():
        raise CatalogError(f"{path} has no config.json: it is not a Hugging Face checkpoint")
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.pth"))
        hint = "convert its pickled weights" if pickled else "the download is incomplete"
        raise CatalogError(f"{path} has no .safetensors file: {hint}")
    if (path / INDEX).is_file():
        _check_shards(path)


def _check_shards(path: Path) -> None:
    try:
        shards = set(json.loads((path / INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise CatalogError(f"{path / INDEX} is not a safetensors index: {error!r}") from error
    missing = sorted(name for name in shards if not (path / str(name)).is_file())
    if missing:
        raise CatalogError(
            f"{path} lacks {len(missing)} of {len(shards)} weight files"
            f" its index names, the first being {missing[0]}: download it again"
        )
