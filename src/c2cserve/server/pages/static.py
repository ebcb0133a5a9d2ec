"""The files of a page, with header fields that let it load nothing from elsewhere."""

from functools import cache
from pathlib import Path

from starlette.responses import Response

from c2cserve.server.errors import ApiError

_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


BASE = Path(__file__).parent / "base.css"
"""The style sheet that all pages have, each under its own path."""


class StaticPage:
    """The files of one folder, and `BASE`. No other file is served."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.names = (*names, BASE.name)
        self._folder = folder
        self._content = cache(self._read)

    def file(self, name: str) -> Response:
        """Return a file of the page. Raises ApiError (404)."""
        if name not in self.names:
            raise ApiError(404, "this page has no such file")
        kind = f"{_KINDS[Path(name).suffix]}; charset=utf-8"
        return Response(self._content(name), headers={**_HEADERS, "content-type": kind})

    def _read(self, name: str) -> bytes:
        return (BASE if name == BASE.name else self._folder / name).read_bytes()
