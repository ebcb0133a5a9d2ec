"""Typed answers of a server's admin API."""

from typing import TypeVar
from urllib.parse import quote

import msgspec

from c2cserve.bench.client import ask
from c2cserve.core.model import ModelStatus
from c2cserve.terminal.output import CliError

T = TypeVar("T")


def find_model(url: str, key: str | None, name: str) -> ModelStatus:
    return decode(ask(url, f"/admin/models/{quote(name)}", key=key), ModelStatus)


def decode(text: str, kind: type[T]) -> T:
    """Decode an answer of the admin API. Raises `CliError` if it has another form."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise CliError(f"the server is not a c2cserve of this version: {error}") from error
