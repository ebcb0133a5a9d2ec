"""Single HTTP requests to a server, for commands that manage or watch it."""

import json
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from c2cserve.terminal.output import CliError


class Unanswered(CliError):
    """The server refused (`status`), or could not be reached (status 0)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def server_root(url: str) -> str:
    """Return the root of a server. `url` is this or its `/v1`.

    Raises `CliError` for any other text."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CliError(f"{url!r} is not a URL such as http://127.0.0.1:8000", 2)
    return url.rstrip("/").removesuffix("/v1")


def ask(
    url: str,
    path: str,
    *,
    key: str | None = None,
    method: str = "GET",
    body: object = None,
    timeout_s: float = 10.0,
) -> str:
    """Return the text of a server's answer. Raises `Unanswered` with the server's own reason."""
    root = server_root(url)
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(root + path, data=data, method=method)
    if data is not None:
        request.add_header("content-type", "application/json")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        reason = _reason(error.read()) or error.reason
        raise Unanswered(f"{root}{path} answered {error.code}: {reason}", error.code) from error
    except (urllib.error.URLError, OSError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise Unanswered(f"no server at {root}: {cause}", 0) from error


def _reason(data: bytes) -> str:
    """Return the message of an error in OpenAI's form, or ""."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
