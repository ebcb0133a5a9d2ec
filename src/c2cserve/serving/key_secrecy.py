"""Keeping keys secret: key files, command lines, and warnings about open access."""

import ctypes
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from c2cserve.processes.shown_arguments import shown_arguments
from c2cserve.server.settings import ServerSettings
from c2cserve.terminal.output import CliError

_KEY_OPTIONS = ("--api-key", "--admin-key")
_KEY_BYTES_MAX = 4096


def read_key(path: Path) -> str:
    """Return the key that a file holds. Raises CliError: it cannot be read, is empty, or other
    users can read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_KEY_BYTES_MAX + 1)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", 2) from error
    if mode & stat.S_IROTH:
        raise CliError(f"{path}: all users of this machine can read it: chmod o-rwx {path}", 2)
    try:
        key = text.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise CliError(f"{path}: a key is printable ASCII", 2) from error
    if not key or len(text) > _KEY_BYTES_MAX or not key.isprintable() or " " in key:
        raise CliError(f"{path}: it must hold one key, printable ASCII without spaces", 2)
    return key


def choose_admin_key(given: str, path: Path | None) -> str:
    """Return the administrator's key, empty if there is none. Raises CliError."""
    if path is None:
        return given
    if given:
        raise CliError("an admin key and --admin-key-file are both given: keep one of them", 2)
    return read_key(path)


# ---- command lines ------------------------------------------------------------------------------


def keys_on_command_line() -> list[str]:
    """Return the options on this process's command line that hold keys."""
    return [one for one in _KEY_OPTIONS if any(a.partition("=")[0] == one for a in sys.argv)]


def hide_keys() -> None:
    """Overwrite keys in what `ps` shows of this process.

    They were shown until now. They also stay in other places that hold the command line: a shell's
    history, a unit file, a container's configuration.
    """
    start, shown = shown_arguments()
    spans = list(_key_spans(shown))
    if not spans:
        return
    # The kernel shows the bytes at this address on the stack. No other bytes are written.
    if not _on_stack(start, len(shown)) or ctypes.string_at(start, len(shown)) != shown:
        return
    for first, end in spans:
        ctypes.memset(start + first, ord("x"), end - first)


def _key_spans(command_line: bytes) -> Iterator[tuple[int, int]]:
    """Yield first byte and end of each key in arguments that end with NUL."""
    options = {option.encode() for option in _KEY_OPTIONS}
    place, key_follows = 0, False
    for argument in command_line.split(b"\0"):
        option, assigned, value = argument.partition(b"=")
        end = place + len(argument)
        if key_follows:
            yield place, end
        elif option in options and assigned:
            yield end - len(value), end
        key_follows = not key_follows and argument in options
        place = end + 1


def _on_stack(start: int, size: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[stack]"):
            first, _, end = line.split()[0].partition("-")
            return int(first, 16) <= start and start + size <= int(end, 16)
    return False


# ---- warnings -----------------------------------------------------------------------------------


def exposures(settings: ServerSettings, host: str, *, keys: bool) -> Iterator[str]:
    """Yield warnings for the operator about who can use the server. `keys`: /v1 asks for keys."""
    if not settings.access.loopback_only and not keys:
        yield (
            f"THERE ARE NO API KEYS: every client that reaches {host} can use every model. "
            "Start with C2CSERVE_API_KEYS, or listen on 127.0.0.1"
        )
    for option in keys_on_command_line():
        name = "C2CSERVE_API_KEYS" if option == "--api-key" else "--admin-key-file"
        yield (
            f"a command line is no place for a key: other users may have seen {option} in ps; "
            f"use {name}"
        )
