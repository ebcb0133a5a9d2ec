"""Parsing a mapping (TOML table, admin JSON) into a `CatalogEntry`; every mistake is one line."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from c2cserve.catalog.checkpoint import check_checkpoint
from c2cserve.catalog.entry import CatalogEntry, CatalogError, DtypeChoice
from c2cserve.core.request import Slo
from c2cserve.files.reading import one_line

_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$"
_HUB_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_PATTERN = rf"^({_HUB_PART}/)?{_HUB_PART}$"
# It names files in the hub's cache, and must not lead out of it.
_REVISION_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*$"

Name = Annotated[str, StringConstraints(pattern=_NAME_PATTERN, max_length=200)]


def _hub_id(value: str) -> str:
    """Return a repository id that the hub's library takes, too. Raises ValueError."""
    if "--" in value or ".." in value or value.endswith(".git"):
        raise ValueError("no repository has such an id")
    return value


HubId = Annotated[str, StringConstraints(pattern=_HUB_PATTERN), AfterValidator(_hub_id)]
Revision = Annotated[str, StringConstraints(pattern=_REVISION_PATTERN, max_length=200)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
S = TypeVar("S", bound=BaseModel)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class EntrySettings(BaseModel):
    """Keys that `[defaults]` may set for every model."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: DtypeChoice = "auto"
    ttft_s: Positive = Slo().ttft_s
    tpot_s: Positive = Slo().tpot_s
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    pinned: bool = False
    max_context: Annotated[int, Field(ge=1)] | None = None
    keep_warm_s: NonNegative = 0.0


class EntryKeys(EntrySettings):
    """All keys of one `[[models]]` table."""

    id: Name
    aliases: list[Name] = []
    path: NonEmpty | None = None
    hub: HubId | None = None
    revision: Revision | None = None


class KeyMistake(CatalogError):
    """A mistake in one key; a file's reader adds the line."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def parse_entry(values: Mapping[str, object], base_dir: Path) -> CatalogEntry:
    """Check one entry; a relative `path` is taken from `base_dir`.

    Raises `CatalogError` (one line that names the key and what to do). The files at a `path` are
    not checked (`check_files` does), and a `hub` id is only checked for its form.
    """
    keys = check_keys(EntryKeys, values)
    if keys.path is None and keys.hub is None:
        raise KeyMistake("id", "it has no weights: set path (a directory) or hub (a repository id)")
    if keys.path is not None and keys.hub is not None:
        raise KeyMistake("hub", "path and hub are both set: keep one of them")
    if keys.revision is not None and keys.hub is None:
        raise KeyMistake("revision", "revision is set without hub: it only selects a hub version")
    _check_distinct(keys.id, keys.aliases)
    path = None
    if keys.path is not None:
        try:
            path = (base_dir / Path(keys.path).expanduser()).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            # Too long, a NUL byte in it, no such user, links that lead to each other.
            raise KeyMistake("path", f"{one_line(keys.path)}: {one_line(error)}") from error
    return CatalogEntry(
        id=keys.id,
        aliases=tuple(keys.aliases),
        path=path,
        hub=keys.hub,
        revision=keys.revision or "main",
        dtype=keys.dtype,
        slo=Slo(keys.ttft_s, keys.tpot_s),
        priority=keys.priority,
        pinned=keys.pinned,
        max_context=keys.max_context,
        keep_warm_s=keys.keep_warm_s,
    )


def check_files(entry: CatalogEntry) -> None:
    """Check that the entry's `path`, if it has one, is a checkpoint. Raises `CatalogError`."""
    if entry.path is not None:
        try:
            check_checkpoint(entry.path)
        except CatalogError as error:
            raise KeyMistake("path", str(error)) from error


def _check_distinct(name: str, aliases: list[str]) -> None:
    for position, alias in enumerate(aliases):
        if alias == name or alias in aliases[:position]:
            raise KeyMistake("aliases", f"the alias {alias!r} is given twice: remove one")


def check_keys(schema: type[S], values: Mapping[str, object]) -> S:
    """Validate a table. Raises `KeyMistake` for the first mistake."""
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        # A misspelt key explains a missing one, so it is reported first.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        raise _mistake(problems[0], schema.model_fields) from error


def _mistake(problem: Mapping[str, Any], names: Iterable[str]) -> KeyMistake:
    key = ".".join(str(part) for part in problem["loc"])
    root = key.split(".", maxsplit=1)[0]
    given = problem["input"]
    if problem["type"] == "extra_forbidden":
        return KeyMistake(root, unknown_key(root, names))
    if problem["type"] == "missing":
        return KeyMistake(root, f"{key} is missing: every model needs one")
    if problem["type"] in ("string_pattern_mismatch", "value_error"):
        wanted = (
            "a repository id such as Qwen/Qwen3-8B"
            if root == "hub"
            else "ASCII letters, digits and . _ : / @ + - (first a letter or digit)"
        )
    else:
        wanted = str(problem["msg"]).removeprefix("Input should be ").removeprefix("a valid ")
    return KeyMistake(root, f"{key} = {_shown(given)} is not valid: it must be {wanted}")


def _shown(value: object) -> str:
    text = repr(value).lower() if isinstance(value, bool) else one_line(repr(value))
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_key(key: str, names: Iterable[str]) -> str:
    """Return the message for an unknown key, with the most similar key that exists."""
    existing = list(names)
    near = difflib.get_close_matches(key, existing, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(sorted(existing))}"
    return f"unknown key {one_line(repr(key))}: {hint}"
