"""Sizes of memory as options take them: 8000000000, 8GB, 7.5GiB, or 8Gi as in Kubernetes."""

from functools import partial

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

_SIZE = TypeAdapter(ByteSize)


def read_size(text: str, least: int = 1) -> int:
    """Return a size in bytes. Raises BadParameter for what is no size, or less than `least`."""
    # A default comes as what it is.
    given = f"{text}B" if str(text).strip().lower().endswith("i") else text
    try:
        size = int(_SIZE.validate_python(given))
    except ValidationError:
        size = -1
    if size < least:
        raise typer.BadParameter(
            f"{str(text)!r} is no size of {least} bytes or more: write 8000000000, 8GB, 7.5GiB"
            " or 8Gi"
        )
    return size


def size_option(help_: str, least: int = 1, panel: str | None = None) -> typer.models.OptionInfo:
    """Return an option that takes a size."""
    return typer.Option(
        parser=partial(read_size, least=least), metavar="SIZE", help=help_, rich_help_panel=panel
    )
