"""Finding and distrusting safetensors checkpoints. Nothing here unpickles, or trusts a header."""

import json
import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from c2cserve.core.tensors import Dtype
from c2cserve.files.reading import (
    INDEX_BYTES_MAX,
    FileProblem,
    is_file,
    one_line,
    open_regular,
    read_object,
)
from c2cserve.memory.layout import LayoutPlan

_HEADER_BYTES_MAX = 32 << 20
"""Some hundred thousand tensors in one file."""
_DTYPES: dict[str, tuple[Dtype | None, int]] = {
    "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F64": (None, 8), "I64": (None, 8), "I32": (None, 4), "I16": (None, 2), "I8": (None, 1),
    "U64": (None, 8), "U32": (None, 4), "U16": (None, 2), "U8": (None, 1), "BOOL": (None, 1),
    "F8_E4M3": (None, 1), "F8_E5M2": (None, 1), "F8_E8M0": (None, 1),
}  # fmt: skip
_DIMENSIONS_MAX = 8
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_NAME_SHOWN = 120
_SHOWN = 5
"""Mismatches named in one message."""


class CheckpointError(ValueError):
    """The checkpoint cannot be served. One line names the file or tensor, and says what to do."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The bytes of a checkpoint tensor. `dtype` is None for a type that weights cannot have."""

    path: Path
    offset: int
    """Bytes from the start of the file."""
    bytes: int
    shape: tuple[int, ...]
    dtype: Dtype | None
    stored: str


def find_files(directory: Path) -> list[Path]:
    """Return a checkpoint directory's safetensors files, sharded or not. Raises CheckpointError."""
    names = _listed(directory / "model.safetensors.index.json")
    for name in names:
        if not is_file(directory / name):
            raise CheckpointError(
                f"{directory / _shown(name)}: shard is missing ({len(names)} are listed in the "
                "index); copy or download it again"
            )
    if names:
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if is_file(single):
        return [single]
    others = sorted(directory.glob("*.safetensors"))
    if others:
        _no_shard_missing(directory, others)
        return others
    if any(directory.glob("*.bin")) or any(directory.glob("*.pth")):
        raise CheckpointError(
            f"{directory}: only pickled weights; convert them to safetensors "
            "(model.save_pretrained(..., safe_serialization=True))"
        )
    raise CheckpointError(f"{directory}: no *.safetensors files")


def _listed(index: Path) -> list[str]:
    """Return the files that an index names, none without an index. Raises CheckpointError."""
    try:
        content = read_object(index, INDEX_BYTES_MAX)
        if content is None:
            return []
        names = sorted(set(content["weight_map"].values()))
    except FileProblem as problem:
        raise CheckpointError(str(problem)) from problem
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index}: not a checkpoint index: {one_line(repr(error))}"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name:
            raise CheckpointError(f"{index}: {_shown(repr(name))} is not a file name")
    if not names:
        raise CheckpointError(f"{index}: it lists no files")
    return names


def _no_shard_missing(directory: Path, files: list[Path]) -> None:
    """Check that no shard is missing: without an index, the shards' names tell their number.
    Raises CheckpointError."""
    names = {path.name for path in files}
    for name in sorted(names):
        if (match := _SHARD.fullmatch(name)) is None:
            continue
        stem, count = match[1], int(match[3])
        for number in range(1, count + 1):
            shard = f"{stem}-{number:05}-of-{count:05}.safetensors"
            if shard not in names:
                raise CheckpointError(
                    f"{directory / shard}: shard is missing; copy or download it again"
                )


def read_header(path: Path) -> dict[str, TensorSource]:
    """Return the tensors of one file by name, checked against the file's real size.

    Raises CheckpointError.
    """
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
            (length,) = struct.unpack("<Q", head)
            if length > min(_HEADER_BYTES_MAX, size - 8):
                raise CheckpointError(f"{path}: header of {length} bytes in a file of {size}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except FileProblem as problem:
        raise CheckpointError(str(problem)) from problem
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("not an object")
        fields = {name: value for name, value in header.items() if name != "__metadata__"}
        tensors = {
            name: _source(path, name, value, 8 + length, size) for name, value in fields.items()
        }
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors header: {_shown(repr(error))}") from error
    _no_overlaps(path, tensors)
    return tensors


def _shown(name: object) -> str:
    """Return a name out of the file, fit for one line of a log or a terminal."""
    return one_line(name, _NAME_SHOWN)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name is listed twice")
    return result


def _source(path: Path, name: str, value: object, base: int, size: int) -> TensorSource:
    if not isinstance(value, dict):
        raise TypeError(f"{name} is not an object")
    shape, offsets, stored = value["shape"], value["data_offsets"], value["dtype"]
    numbers = [*shape, *offsets]
    name = _shown(name)
    if (
        len(offsets) != 2
        or len(shape) > _DIMENSIONS_MAX
        or any(type(n) is not int or n < 0 for n in numbers)
    ):
        raise CheckpointError(f"{path}: tensor {name} has a malformed shape or offset")
    if stored not in _DTYPES:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {_shown(stored)}")
    dtype, item = _DTYPES[stored]
    begin, end = offsets
    if end - begin != prod(shape) * item:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {_shown(shape)} and {stored} takes "
            f"{prod(shape) * item} bytes, the header gives it {end - begin}"
        )
    if base + end > size:
        raise CheckpointError(
            f"{path}: truncated: tensor {name} ends at byte {base + end}, the file has {size}; "
            "copy or download it again"
        )
    return TensorSource(path, base + begin, end - begin, tuple(shape), dtype, stored)


def _no_overlaps(path: Path, tensors: dict[str, TensorSource]) -> None:
    end, before = 0, ""
    for name, source in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if source.offset < end and source.bytes:
            raise CheckpointError(f"{path}: tensors {_shown(before)} and {_shown(name)} overlap")
        if source.bytes:
            end, before = source.offset + source.bytes, name


def open_checkpoint(directory: Path, plan: LayoutPlan) -> dict[str, TensorSource]:
    """Return every tensor the plan needs, with names, shapes and dtypes checked.

    Raises CheckpointError naming the tensors, what was expected and what was found.
    """
    found: dict[str, TensorSource] = {}
    for path in find_files(directory):
        for name, source in read_header(path).items():
            if name in found:
                raise CheckpointError(
                    f"{path}: tensor {_shown(name)} is also in {found[name].path.name}"
                )
            found[name] = source
    problems: list[str] = []
    needed: dict[str, tuple[int, ...]] = {}
    for group in plan.groups:
        for part in group.parts:
            needed[part.source] = part.shape
    for name, shape in needed.items():
        source = found.get(name)
        if source is None:
            problems.append(f"{name} is missing (expected shape {list(shape)})")
        elif source.shape != shape:
            problems.append(f"{name} has shape {list(source.shape)}, expected {list(shape)}")
        elif source.dtype is None:
            problems.append(f"{name} has dtype {source.stored}, expected F32, F16 or BF16")
    for name in found:
        if name not in needed and not name.endswith(plan.optional):
            problems.append(f"{_shown(name)} is not part of this architecture")
    if problems:
        more = len(problems) - _SHOWN
        listed = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(f"{directory}: the weights do not match config.json: {listed}")
    return {name: found[name] for name in needed}


def open_for_reading(path: Path) -> int:
    """Return a descriptor for positional reads, with read-ahead asked for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd
