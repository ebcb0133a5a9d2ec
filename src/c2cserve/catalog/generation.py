"""Sampling defaults of a checkpoint: the fields of generation_config.json that requests have too.

Other fields of the file are not used here. Its end tokens belong to the model's config
(`engine.models.config.read_config`). `do_sample` has no counterpart in requests: it is not read.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from c2cserve.catalog.entry import CatalogError
from c2cserve.core.request import SamplingDefaults
from c2cserve.files.reading import CONFIG_BYTES_MAX, FileProblem, one_line, read_object

_FILE = "generation_config.json"
_AUTO = "auto"
_OFF = ("none", "vllm")
"""`vllm` is what vLLM's option of this name calls it."""
_SHOWN_CHARS = 80


class _Fields(BaseModel):
    """The same bounds as for requests (`server.fields`)."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


def chosen_defaults(choice: str) -> SamplingDefaults | None:
    """Return what `--generation-config` means for all models: defaults, or None for those of each
    checkpoint.

    `choice`: `auto`; `none` (or `vllm`) for no defaults; or a directory with the file to use for
    all models. Raises CatalogError.
    """
    if choice == _AUTO:
        return None
    if choice in _OFF:
        return SamplingDefaults()
    directory = Path(choice)
    found = _read(directory)
    if found is None:
        raise CatalogError(
            f"--generation-config {one_line(choice)}: {one_line(directory / _FILE)}: no such file"
        )
    return found


def read_defaults(directory: Path) -> SamplingDefaults:
    """Return the defaults of the checkpoint in a directory; empty ones if it has no such file.

    Raises CatalogError for a value that no request may have."""
    return _read(directory) or SamplingDefaults()


def _read(directory: Path) -> SamplingDefaults | None:
    path = directory / _FILE
    try:
        raw = read_object(path, CONFIG_BYTES_MAX)
    except FileProblem as problem:
        raise CatalogError(str(problem)) from problem
    if raw is None:
        return None
    given: dict[str, Any] = {name: raw.get(name) for name in _Fields.model_fields}
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise _mistake(path, name, value, "a number")
    try:
        fields = _Fields.model_validate(given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        wanted = str(problem["msg"]).removeprefix("Input should be ")
        raise _mistake(path, str(problem["loc"][0]), problem["input"], wanted) from error
    return SamplingDefaults(**fields.model_dump())


def _mistake(path: Path, name: str, value: object, wanted: str) -> CatalogError:
    try:
        shown = one_line(repr(value), _SHOWN_CHARS)
    except ValueError:  # an integer of thousands of digits
        shown = "its value"
    return CatalogError(
        f"{one_line(path)}: {name} = {shown} is not valid: it must be {one_line(wanted)}"
        " (--generation-config none leaves such files unread)"
    )
