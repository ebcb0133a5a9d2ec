"""Models from a hub, stored in the cache layout of huggingface_hub. So this server uses downloads
of other tools, and they use its downloads."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path

from c2cserve.catalog.checkpoint import check_checkpoint
from c2cserve.catalog.entry import CatalogEntry, CatalogError
from c2cserve.catalog.foreign import foreign_kind
from c2cserve.catalog.hub_http import HubClient, HubError, HubFile, HubRepository, Unreachable
from c2cserve.catalog.progress import ProgressLog

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""A function of (file, bytes done, bytes in all), called from several threads, one call at a time.
An exception from it stops the download; the bytes that have arrived are kept for the next time."""

_SIDE_FILES = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer*",
    "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
_PARALLEL = 4


def cache_dir() -> Path:
    """Return the directory of downloaded repositories (HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch(
    entry: CatalogEntry,
    root: Path | None = None,
    progress: Progress | None = None,
    *,
    client: HubClient | None = None,
) -> Path:
    """Return the directory of a hub entry's checkpoint, after downloading the missing files.

    HF_ENDPOINT, HF_HOME / HF_HUB_CACHE, HF_TOKEN and HF_HUB_OFFLINE have the same meaning as in
    huggingface_hub. Offline, or with the hub unreachable, a complete cached copy is used. Without
    `progress`, the log shows the progress.

    Raises `HubError`: one line that says what to do.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.file_download import repo_folder_name

    if entry.hub is None:
        raise ValueError(f"{entry.id} is not a hub entry")
    folder = (root or cache_dir()) / repo_folder_name(repo_id=entry.hub, repo_type="model")
    if constants.HF_HUB_OFFLINE:
        return _cached(folder, entry, "HF_HUB_OFFLINE is set")
    client = client or HubClient(constants.ENDPOINT, get_token())
    try:
        repository = client.repository(entry.hub, entry.revision)
    except Unreachable as error:
        path = _cached(folder, entry, str(error))
        log.warning("%s: %s; using the cached copy %s", entry.id, error, path)
        return path
    return _download(client, repository, folder, entry, progress)


def _cached(folder: Path, entry: CatalogEntry, why: str) -> Path:
    """Return a complete snapshot on disk. Raises `HubError`."""
    reference = folder / "refs" / entry.revision
    commit = reference.read_text().strip() if reference.is_file() else entry.revision
    path = folder / "snapshots" / commit
    try:
        check_checkpoint(path)
    except CatalogError as error:
        raise HubError(
            f"{entry.hub} ({entry.revision}) is not in the cache {folder.parent}, and {why}"
        ) from error
    return path


def _download(
    client: HubClient,
    repository: HubRepository,
    folder: Path,
    entry: CatalogEntry,
    progress: Progress | None,
) -> Path:
    files = choose_files(repository)
    blobs = folder / "blobs"
    snapshot = folder / "snapshots" / repository.commit
    try:
        blobs.mkdir(parents=True, exist_ok=True)
        _check_space(repository.id, files, blobs)
        _transfer(client, repository, files, blobs, progress or ProgressLog(entry.id))
        for file in files:
            _link(snapshot / file.name, blobs / file.etag)
        reference = folder / "refs" / entry.revision
        if entry.revision != repository.commit:
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(repository.commit)
    except OSError as error:
        raise HubError(f"{repository.id} cannot be kept in {folder.parent}: {error}") from error
    check_checkpoint(snapshot)
    return snapshot


def choose_files(repository: HubRepository) -> list[HubFile]:
    """Return the files to download: configuration, tokenizer and weights, largest first.

    Pickled files are left out. So is the second copy of the weights that some repositories have
    under another name. Raises `HubError` when there are no safetensors.
    """
    top = [file for file in repository.files if "/" not in file.name]
    side = [file for file in top if any(fnmatch(file.name, one) for one in _SIDE_FILES)]
    weights = [file for file in top if fnmatch(file.name, "model*.safetensors")]
    weights = weights or [file for file in top if file.name.endswith(".safetensors")]
    if (kind := foreign_kind({file.name for file in top})) is not None:
        raise HubError(f"{repository.id} {kind}")
    if not weights:
        raise HubError(f"{repository.id} holds no .safetensors file: choose another revision")
    if not any(file.name == "config.json" for file in side):
        raise HubError(f"{repository.id} holds no config.json: it is not a model checkpoint")
    return sorted({*side, *weights}, key=lambda file: -file.size_bytes)


def _present_bytes(file: HubFile, blobs: Path) -> int:
    if (blobs / file.etag).exists():
        return file.size_bytes
    partial = blobs / f"{file.etag}.incomplete"
    return min(partial.stat().st_size, file.size_bytes) if partial.exists() else 0


def _check_space(repo: str, files: Sequence[HubFile], blobs: Path) -> None:
    missing = sum(file.size_bytes - _present_bytes(file, blobs) for file in files)
    free = shutil.disk_usage(blobs).free
    if missing > free:
        raise HubError(
            f"{repo} needs {missing / 1e9:.3f} GB more in {blobs}, where {free / 1e9:.3f} GB are"
            " free: make room, or set HF_HUB_CACHE to another disk"
        )
    if missing:
        log.info("%s: downloading %.3f GB to %s", repo, missing / 1e9, blobs.parent)


def _transfer(
    client: HubClient,
    repository: HubRepository,
    files: Sequence[HubFile],
    blobs: Path,
    progress: Progress,
) -> None:
    reporting = threading.Lock()
    stopped = threading.Event()

    def one(file: HubFile) -> None:
        def advance(done_bytes: int) -> None:
            if stopped.is_set():
                raise HubError("another file's download failed, or the program is ended")
            with reporting:
                progress(file.name, done_bytes, file.size_bytes)

        if not (blobs / file.etag).exists():
            client.download(repository.id, repository.commit, file, blobs / file.etag, advance)

    for file in files:
        progress(file.name, _present_bytes(file, blobs), file.size_bytes)
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="hub") as threads:
        transfers = [threads.submit(one, file) for file in files]
        try:
            for transfer in as_completed(transfers):
                transfer.result()
        finally:
            # Leaving the pool waits for its threads.
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)


def _link(pointer: Path, blob: Path) -> None:
    """Point to a blob from a snapshot, relative, as the cache may be moved or mounted elsewhere."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if not pointer.exists():
        pointer.unlink(missing_ok=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
