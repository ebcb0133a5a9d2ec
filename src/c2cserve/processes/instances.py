"""What a run of the server owns in shared memory: files that begin with its instance's name.

The run holds a lock as long as it lives. If the lock is free, its files may be removed.
"""

import errno
import fcntl
import glob
import os
import time
from pathlib import Path

PREFIX = "c2cserve"
_CLEANER_S = 1.0
"""How long another server's clean-up may hold a lock that is not its own."""
_RETRY_S = 0.02
_NO_LOCK = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening a lock: its owner has just ended, or is another user, or it is no file."""


class InstanceTaken(RuntimeError):
    """Another run that lives has the instance."""


def _lock_path(directory: Path, instance: str) -> Path:
    return directory / f"{PREFIX}.{instance}.lock"


def take_instance(directory: Path, instance: str) -> int:
    """Take the instance's lock, and remove the files of a dead run of that name. Return the lock's
    descriptor: to close it, or to end, gives the lock back.

    Another server that cleans up at this moment may take the new lock file for a dead run's. It
    holds the lock for an instant and removes the file, which then has to be made again. Raises
    InstanceTaken and OSError.
    """
    path = _lock_path(directory, instance)
    deadline = time.monotonic() + _CLEANER_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            if time.monotonic() > deadline:
                raise InstanceTaken(
                    f"another run has the instance {instance} in {directory}"
                ) from error
            time.sleep(_RETRY_S)
            continue
        if _names(path, fd):
            _remove_files(directory, instance)
            return fd
        os.close(fd)


def _names(path: Path, fd: int) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _remove_files(directory: Path, instance: str) -> None:
    for path in directory.glob(f"{PREFIX}.{glob.escape(instance)}.*"):
        if path != _lock_path(directory, instance):
            path.unlink(missing_ok=True)


def remove_instance(directory: Path, instance: str) -> None:
    """Remove an instance's files, its lock last."""
    _remove_files(directory, instance)
    _lock_path(directory, instance).unlink(missing_ok=True)


def remove_dead_runs(directory: Path) -> list[str]:
    """Remove what killed servers left behind: every instance whose lock is free. Return them.

    Two servers that start at once do not disturb each other: each holds its lock before it creates
    files. Locks of other users are left alone. A lock's name says which files to remove, and where
    all users may write, any of them may choose it.
    """
    removed: list[str] = []
    for lock in directory.glob(f"{PREFIX}.*.lock"):
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in _NO_LOCK:
                raise
            continue
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # alive
        else:
            if not _names(lock, fd):
                continue  # another cleaner was faster, and the name may be in use again
            instance = lock.name.removeprefix(f"{PREFIX}.").removesuffix(".lock")
            remove_instance(directory, instance)
            removed.append(instance)
        finally:
            os.close(fd)
    return removed
