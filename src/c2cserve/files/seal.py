"""Seals of a checkpoint's files when they were checked, to notice later changes."""

import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from c2cserve.files.patience import open_patiently
from c2cserve.files.reading import TOKENIZER_BYTES_MAX, FileProblem, open_regular

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIG_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")


_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FileSeal:
    """The seal of one file. `digest` covers a safetensors file's header, and all of any other
    file."""

    path: Path
    size: int
    mtime_ns: int
    inode: int
    digest: bytes
    ctime_ns: int = field(compare=False)
    """Changes of permissions and links change it, too. So a new one only says that contents may
    have changed."""
    samples: bytes = field(compare=False)
    """A digest of `_SAMPLES` blocks of a safetensors file. If weights are rewritten in place with
    the same size and time, only `ctime_ns` shows it, and reading all of them takes seconds."""
    real: Path = field(compare=False)
    """The place of the opened file, after all links."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The seals of a checkpoint's files; None for a file that it could have and has not."""

    files: dict[Path, FileSeal | None]

    def changed(self) -> str | None:
        """Return the first changed file and what changed in it; None if none has. Never raises."""
        for path, before in self.files.items():
            try:
                now = _seal(path, before)
            except (OSError, ValueError) as error:
                return f"{path.name} ({error})"
            if before is None or now is None:
                if now is before:
                    continue
                return f"{path.name} ({'is new' if before is None else 'is gone'})"
            fields = ("size", "mtime_ns", "inode", "digest")
            if now == before:
                if now.ctime_ns == before.ctime_ns:
                    continue
                fields = ("samples",)
            other = [name for name in fields if getattr(now, name) != getattr(before, name)]
            if other:
                return f"{path.name} (other {', '.join(other)})"
        return None


def seal_files(paths: Iterable[Path]) -> Seal:
    """Seal files. Raises FileProblem."""
    sealed: dict[Path, FileSeal | None] = {}
    for path in paths:
        try:
            sealed[path] = _seal(path)
        except OSError as error:
            raise FileProblem(f"{path}: cannot be read: {error.strerror}") from error
    return Seal(sealed)


def _seal(path: Path, before: FileSeal | None = None) -> FileSeal | None:
    """Return the file's seal now, None if there is no file. Samples are read again only if its
    `ctime_ns` differs from that of `before`."""
    try:
        fd = open_patiently(partial(open_regular, path))
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        most = TOKENIZER_BYTES_MAX
        if path.suffix == ".safetensors":
            head = file.read(8)
            most = min(most, struct.unpack("<Q", head)[0]) if len(head) == 8 else 0
        digest = hashlib.blake2b(digest_size=16)
        while most > 0 and (part := file.read(min(most, 1 << 20))):
            digest.update(part)
            most -= len(part)
        real = Path(os.readlink(f"/proc/self/fd/{fd}"))
        samples = b""
        if before is not None and before.ctime_ns == status.st_ctime_ns:
            samples = before.samples
        elif path.suffix == ".safetensors":
            samples = _samples(fd, status.st_size)
    return FileSeal(
        path, status.st_size, status.st_mtime_ns, status.st_ino, digest.digest(),
        status.st_ctime_ns, samples, real,
    )  # fmt: skip


def _samples(fd: int, size: int) -> bytes:
    """Return a digest of blocks evenly spread over the file."""
    digest = hashlib.blake2b(digest_size=16)
    for number in range(_SAMPLES):
        digest.update(os.pread(fd, _SAMPLE_BYTES, number * size // _SAMPLES))
    return digest.digest()
