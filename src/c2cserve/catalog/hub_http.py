"""HTTP with a model hub: listing a repository, and downloads that resume after a failure.

huggingface_hub removes a partial file when a transfer fails: a 5 GB shard that fails at 90 % starts
over. Here the partial file stays, for this process and for the next.
"""

import fcntl
import hashlib
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import quote, urlsplit

from c2cserve.catalog.entry import CatalogError
from c2cserve.core.backoff import back_off_s

_CHUNK_BYTES = 1 << 20
_STALL_S = 30.0
"""A connection without a byte for longer counts as broken."""
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.5, 30.0
_BROKEN = (
    urllib.error.URLError, ConnectionError, TimeoutError, ssl.SSLError, http.client.HTTPException,
)  # fmt: skip
"""Errors of the network. Other `OSError`s are errors of the disk."""
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class HubError(CatalogError):
    """The hub does not have the model, refuses it, or cannot be reached."""


class Unreachable(HubError):
    """The hub did not answer after all retries; a cached copy may be used."""


class Advance(Protocol):
    def __call__(self, done_bytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file. `etag` is a hash of its content: SHA-256 (64 digits) for large files, else git's
    SHA-1."""

    name: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True)
class HubRepository:
    id: str
    """The hub's own spelling (a renamed repository answers to its old id)."""
    commit: str
    files: tuple[HubFile, ...]


class _KeepSecret(urllib.request.HTTPRedirectHandler):
    """Sends the token to the hub alone: files come from other storage, by signed URLs."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


class HubClient:
    """Requests to one hub. Blocking, thread-safe."""

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        *,
        retries: int = 5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`retries` counts failures in a row without a new byte."""
        self._endpoint = endpoint.rstrip("/")
        self._headers = {"User-Agent": "c2cserve"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._has_token = bool(token)
        self._retries = retries
        self._sleep = sleep
        self._opener = urllib.request.build_opener(_KeepSecret())

    def repository(self, repo: str, revision: str) -> HubRepository:
        """List a revision's files. Raises `HubError`."""
        place = f"/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        failures = 0
        while True:
            try:
                with self._open(place, {}) as answer:
                    return _parse_listing(repo, answer.read())
            except urllib.error.HTTPError as error:
                if error.code not in _TRANSIENT:
                    raise self._refused(error, repo, revision) from error
                problem: Exception = error
            except (OSError, http.client.HTTPException) as error:
                problem = error
            failures += 1
            self._back_off(failures, problem, f"{self._endpoint} cannot be reached")

    def download(
        self, repo: str, commit: str, file: HubFile, target: Path, advance: Advance
    ) -> None:
        """Fetch a file to `target`, continuing `target`.incomplete if there is one. The content is
        checked against its etag before it gets its name. Raises `HubError`, `OSError` (disk)."""
        partial = target.with_name(f"{target.name}.incomplete")
        done = False
        while not done:
            with partial.open("ab+") as out:
                # One of several downloads it, the others wait here and find it done.
                fcntl.flock(out, fcntl.LOCK_EX)
                done = target.exists()
                if done:
                    if _is_at(out, partial):  # made by opening it, after the other one's rename
                        partial.unlink()
                    advance(file.size_bytes)
                elif _is_at(out, partial):  # else the one before found it damaged and removed it
                    self._download(repo, commit, file, out, partial, advance)
                    partial.rename(target)
                    done = True

    def _download(
        self, repo: str, commit: str, file: HubFile, out: IO[bytes], partial: Path, advance: Advance
    ) -> None:
        """Complete `out`, and write all of it to the disk. If it is damaged and began earlier, that
        part may be the cause: it is fetched anew. Raises `HubError`, after removing `partial`."""
        began_earlier = out.seek(0, os.SEEK_END) > 0
        self._complete(repo, commit, file, out, advance)
        sound = _is_sound(file, out)
        if began_earlier and not sound:
            out.truncate(0)
            self._complete(repo, commit, file, out, advance)
            sound = _is_sound(file, out)
        if not sound:
            partial.unlink()
            raise HubError(
                f"{file.name} arrived damaged (its hash is wrong): start the download again"
            )
        out.flush()
        os.fsync(out.fileno())

    def _complete(
        self, repo: str, commit: str, file: HubFile, out: IO[bytes], advance: Advance
    ) -> None:
        place = f"/{repo}/resolve/{commit}/{quote(file.name)}"
        failures = 0
        while (have := out.seek(0, os.SEEK_END)) < file.size_bytes:
            try:
                self._continue(place, file, have, out, advance)
                problem: Exception = ConnectionError("the connection ended early")
            except urllib.error.HTTPError as error:
                if error.code not in _TRANSIENT:
                    raise self._refused(error, repo, commit, file.name) from error
                problem = error
            except _BROKEN as error:
                problem = error
            now = out.seek(0, os.SEEK_END)
            if now < file.size_bytes:
                failures = 1 if now > have else failures + 1
                self._back_off(failures, problem, f"the download of {repo} {file.name} broke off")

    def _continue(
        self, place: str, file: HubFile, have: int, out: IO[bytes], advance: Advance
    ) -> None:
        """One connection's worth; appends to `out`."""
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._open(place, headers) as answer:
            if have and answer.status != 206:
                # A server without ranges sends the whole file.
                have = 0
                out.truncate(0)
            advance(have)
            while chunk := answer.read(min(_CHUNK_BYTES, file.size_bytes - have + 1)):
                out.write(chunk)
                have += len(chunk)
                advance(min(have, file.size_bytes))
                if have > file.size_bytes:
                    out.truncate(0)
                    raise HubError(f"{file.name} is longer than the hub's listing says")

    def _open(self, place: str, headers: Mapping[str, str]) -> Any:
        request = urllib.request.Request(
            self._endpoint + place, headers={**self._headers, **headers}
        )
        try:
            return self._opener.open(request, timeout=_STALL_S)
        except urllib.error.HTTPError as error:
            error.close()
            raise

    def _back_off(self, failures: int, problem: Exception, what: str) -> None:
        """Wait before the next try, or give up by raising `Unreachable`."""
        if failures > self._retries:
            raise Unreachable(f"{what}: {problem}") from problem
        wait_s = back_off_s(failures - 1, _BACKOFF_FIRST_S, _BACKOFF_MAX_S)
        if isinstance(problem, urllib.error.HTTPError):
            wait_s = max(wait_s, _retry_after_s(problem.headers))
        self._sleep(min(wait_s, _BACKOFF_MAX_S))

    def _refused(
        self, error: urllib.error.HTTPError, repo: str, revision: str, file: str = ""
    ) -> HubError:
        reason = str(error.headers.get("X-Error-Code") or "")
        where = f"{repo} at {self._endpoint}"
        if reason == "GatedRepo":
            return HubError(
                f"{where} is gated: accept its terms on its page, and set HF_TOKEN to your token"
            )
        if reason == "RevisionNotFound":
            return HubError(f"{where} has no revision {revision!r}")
        if reason == "EntryNotFound":
            return HubError(f"{where} has no file {file!r} at {revision}")
        if error.code in (401, 403):
            hint = (
                "HF_TOKEN may not read it" if self._has_token else "set HF_TOKEN if it is private"
            )
            return HubError(f"{where} is not given to us ({error.code}): check the id; {hint}")
        if error.code == 404:
            return HubError(f"{where} does not exist: check the id")
        return HubError(f"{where}: the hub answered {error.code} {error.reason}")


def _parse_listing(repo: str, data: bytes) -> HubRepository:
    """Parse a listing. Its hashes become names of files, so each must look like a hash. Raises
    `HubError`."""
    try:
        listing = json.loads(data)
        files = tuple(
            HubFile(
                name=str(one["rfilename"]),
                size_bytes=int(one["size"]),
                etag=str((one.get("lfs") or {}).get("sha256") or one["blobId"]),
            )
            for one in listing["siblings"]
        )
        commit = str(listing["sha"])
        hashes = (commit, *(file.etag for file in files))
        if strange := next((text for text in hashes if not _HASH.fullmatch(text)), None):
            raise ValueError(f"{strange!r} is not a hash")
        return HubRepository(str(listing.get("id") or repo), commit, files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{repo}: the hub's listing makes no sense: {error!r}") from error


def _retry_after_s(headers: Message) -> float:
    value = headers.get("Retry-After") or ""
    return float(value) if value.isdigit() else 0.0


def _is_at(out: IO[bytes], path: Path) -> bool:
    """Return whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(out.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_sound(file: HubFile, out: IO[bytes]) -> bool:
    """Return whether the content's hash is right."""
    digest = hashlib.sha256()
    if len(file.etag) != 64:
        digest = hashlib.sha1(f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)
    out.seek(0)
    while chunk := out.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest() == file.etag
