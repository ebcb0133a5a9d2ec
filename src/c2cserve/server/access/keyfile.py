"""The keys file: read whole or not at all, and replaced whole.

It is JSON because a command writes it. `c2cserve keys` changes one entry and leaves the others as
they are. In a TOML file, comments and layout would be lost.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from c2cserve.server.access.mistakes import mistake
from c2cserve.server.access.quota import KeyLimits

_BYTES_MAX = 64 << 20
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z"
"""Names are labels of metrics, fields of CSV files and words of a log."""
_FORBIDDEN = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
"""Permissions that a keys file must not give. Its group may read it: containers get secrets so."""

Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class KeysFileError(ValueError):
    """The keys file cannot be used. The message is one line that names the file and what to do."""


class KeyRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """One key of the file."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
    name: Name
    """The key's name in logs, metrics and exports. It is unique in the file."""
    salt: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    created: Moment
    expires: Moment | None = None
    revoked: Moment | None = None
    tenant: Name | None = None
    """Keys of one tenant share its fair part of the machine and its prefix cache. None: the name
    of the key."""
    cache_group: Name | None = None
    """Tenants of one group share a prefix cache."""
    limits: KeyLimits = KeyLimits()

    @property
    def tenant_name(self) -> str:
        return self.tenant or self.name

    def state(self, now: datetime) -> Literal["active", "revoked", "expired"]:
        """Return the key's state. `now` has a time zone. A future moment of revocation does not
        count yet."""
        if self.revoked is not None and self.revoked <= now:
            return "revoked"
        if self.expires is not None and self.expires <= now:
            return "expired"
        return "active"


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal[1]
    keys: tuple[KeyRecord, ...]


_NO_KEYS = KeysFile(1, ())


def read_keys(path: Path) -> KeysFile:
    """Read a keys file, whole or not at all. Raises KeysFileError for a missing file, a file that
    others may read, and a file with any mistake."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            _check_file(path, os.fstat(descriptor))
            data = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise KeysFileError(f"keys file {path}: {error.strerror}") from error
    if len(data) > _BYTES_MAX:
        raise KeysFileError(f"keys file {path}: larger than {_BYTES_MAX} bytes")
    try:
        keys = msgspec.json.decode(data, type=KeysFile)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise KeysFileError(f"keys file {path}: {mistake(error)}") from error
    for field in ("id", "name"):
        seen: set[str] = set()
        for key in keys.keys:
            value: str = getattr(key, field)
            if value in seen:
                raise KeysFileError(f"keys file {path}: two keys have the {field} {value!r}")
            seen.add(value)
    return keys


def change_keys(path: Path, change: Callable[[KeysFile], KeysFile]) -> None:
    """Replace the file by the result of `change`, atomically for every reader. A missing file
    counts as one without keys. Another process that changes the file waits.

    Raises KeysFileError, and what `change` raises; the file is as before then.
    """
    # If the path is a link, its target is replaced, not the link.
    path = Path(os.path.realpath(path))
    try:
        with _locked(path.parent):
            exists = path.exists()
            changed = change(read_keys(path) if exists else _NO_KEYS)
            content = msgspec.json.format(msgspec.json.encode(changed), indent=2) + b"\n"
            _replace(path, content, path.stat() if exists else None)
    except OSError as error:
        raise KeysFileError(f"keys file {path}: {error.strerror}") from error


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeysFileError(f"keys file {path}: this is no regular file")
    mode = stat.S_IMODE(found.st_mode)
    if mode & _FORBIDDEN:
        raise KeysFileError(
            f"keys file {path}: its mode is {mode:04o}, so other users can read or change it:"
            f" chmod 600 {path}"
        )


@contextmanager
def _locked(directory: Path) -> Generator[None]:
    """Hold a lock on the directory. The file itself is a new one after each change, and a lock file
    would stay behind."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, content: bytes, before: os.stat_result | None) -> None:
    """Write a new file beside `path` (mode 0600 from the start), and rename it to `path`."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if before is not None:
                _keep_owner(descriptor, before)
            os.fsync(descriptor)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _keep_owner(descriptor: int, before: os.stat_result) -> None:
    """Give the new file the owner and mode of the old one, so that a server that runs as another
    user can still read it."""
    os.fchown(descriptor, before.st_uid, before.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
