"""What was measured on this machine: its links, its memory, its GEMM rates, and every dataflow.

One JSON file, written by `c2cserve profile` and read wherever a dataflow is chosen. It belongs to
one GPU model and one version of this schema; another is refused, never reinterpreted.
"""

import contextlib
import dataclasses
import datetime
import os
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from c2cserve.core.tensors import HalfDtype, Home, LinkHome
from c2cserve.kernels.gpu.gemm.dataflows.table import DATAFLOWS, DataflowName
from c2cserve.kernels.gpu.gemm.traffic import Tiles

SCHEMA = 1
"""Raised whenever a field changes its meaning: older profiles are then measured again."""

HOMES: tuple[Home, ...] = get_args(Home)
DTYPES: tuple[HalfDtype, ...] = get_args(HalfDtype)

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]

_PROFILE_IT = "run `c2cserve profile`"


class ProfileError(Exception):
    """There is no profile to decide by; the message is one line that says what to do."""


class ProfileMissing(ProfileError):
    """Nothing was measured here yet."""


class ProfileMismatch(ProfileError):
    """Measured by another version of the schema, or on another GPU."""


class ProfileMalformed(ProfileError):
    """Not a profile; the message names the field."""


TileValues = tuple[float, ...]


def tile_values(dataflow: DataflowName, tiles: Tiles) -> TileValues:
    """What tells this dataflow's tiles apart."""
    return tuple(getattr(tiles, field) for field in DATAFLOWS[dataflow].tile_fields)


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class MachineFacts(_Struct, frozen=True):
    gpu: Text
    """The driver's name for it."""
    sms: Positive
    driver: Text
    host: Text


class ReadRate(_Struct, frozen=True):
    """SM (bulk TMA) reads of a home by `slices` slices at once, `ctas` CTAs each."""

    ctas: Positive
    slices: Positive
    bytes_per_s: Rate
    """The rate of one of the slices."""


class LinkRates(_Struct, frozen=True):
    """A home's link. Copy-engine figures are those of one GPU alone on the link."""

    to_gpu_bytes_per_s: Rate
    from_gpu_bytes_per_s: Rate
    duplex_bytes_per_s: Rate
    """Both directions at once, in sum."""
    reads: Annotated[tuple[ReadRate, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if all(read.slices > 1 for read in self.reads):
            raise ValueError("reads must include one slice alone (slices = 1)")
        _refuse_repeats("reads", Counter((read.ctas, read.slices) for read in self.reads))


class HbmRate(_Struct, frozen=True):
    """Local HBM as `sms` SMs see it."""

    sms: Positive
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate


class MatmulRate(_Struct, frozen=True):
    """cuBLAS with W in HBM, M = `m`, on `sms` SMs, over a shape large enough to fill them."""

    m: Positive
    sms: Positive
    flops_per_s: Rate


class Point(_Struct, frozen=True):
    """One measurement: O[m, n] = X[m, k] W[n, k]^T, or of `experts` such W with `top_k` per row."""

    dataflow: DataflowName
    tiles: Tiles
    m: Positive
    n: Positive
    k: Positive
    dtype: HalfDtype
    home: Home
    sms: Positive
    seconds: Seconds
    neighbours: Count = 0
    """Other slices that were streaming over the same link."""
    experts: Count = 0
    top_k: Count = 0

    def __post_init__(self) -> None:
        if (self.dataflow == "grouped") != (self.experts > 0):
            raise ValueError("experts are what grouped has and nothing else")
        if not min(1, self.experts) <= self.top_k <= self.experts:
            raise ValueError(f"top_k must be within 1 and experts, not {self.top_k}")


class Profile(_Struct, frozen=True):
    machine: MachineFacts
    date: Annotated[datetime.datetime, Meta(tz=True)]
    commit: str
    """The commit of c2cserve that measured."""
    links: Mapping[LinkHome, LinkRates]
    hbm: Annotated[tuple[HbmRate, ...], Meta(min_length=1)]
    matmul_flops: Annotated[tuple[MatmulRate, ...], Meta(min_length=1)]
    points: tuple[Point, ...] = ()
    cut: tuple[str, ...] = ()
    """What there was no time for, and what this GPU could not run: in words, for people."""
    version: int = SCHEMA

    def __post_init__(self) -> None:
        _refuse_repeats("hbm", Counter(rate.sms for rate in self.hbm))
        _refuse_repeats("matmul_flops", Counter((r.m, r.sms) for r in self.matmul_flops))
        _refuse_repeats("points", Counter(map(_identity, self.points)))
        for index, point in enumerate(self.points):
            if point.home != "hbm" and point.home not in self.links:
                raise ValueError(f"points[{index}] is from a {point.home}, which links lacks")


class _Versioned(msgspec.Struct):
    """Read first: what the rest means depends on it."""

    version: int


class _TilesNamed(msgspec.Struct):
    tiles: dict[str, object]


class _PointsNamed(msgspec.Struct):
    points: list[_TilesNamed] = []


_TILE_FIELDS = {field.name for field in dataclasses.fields(Tiles)}


def _identity(p: Point) -> tuple[object, ...]:
    """All but its seconds."""
    tiles = tile_values(p.dataflow, p.tiles)
    size = (p.m, p.n, p.k, p.dtype)
    return p.dataflow, tiles, size, p.home, p.sms, p.neighbours, p.experts, p.top_k


def _refuse_repeats(what: str, keys: Mapping[object, int]) -> None:
    for key, count in keys.items():
        if count > 1:
            raise ValueError(f"{what} has {count} entries for {key}")


def profile_path() -> Path:
    """Where this machine's profile lies unless told otherwise: `$C2CSERVE_HOME/profile.json`, or
    `~/.cache/c2cserve/profile.json`."""
    home = os.environ.get("C2CSERVE_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "c2cserve") / "profile.json"


def encode_profile(profile: Profile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"


def decode_profile(data: bytes) -> Profile:
    """Raises `ProfileMismatch` (another version) or `ProfileMalformed` (which field)."""
    try:
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != SCHEMA:
            raise ProfileMismatch(
                f"is a profile of version {version}, this is {SCHEMA}: {_PROFILE_IT}"
            )
        profile = msgspec.json.decode(data, type=Profile)
        # Tiles is a plain dataclass: msgspec would take the default for a field it cannot place.
        for index, point in enumerate(msgspec.json.decode(data, type=_PointsNamed).points):
            for name in point.tiles.keys() - _TILE_FIELDS:
                raise msgspec.ValidationError(
                    f"Unknown field `{name}` - at `$.points[{index}].tiles`"
                )
    except msgspec.DecodeError as error:
        raise ProfileMalformed(f"is not a profile: {error}: {_PROFILE_IT}") from error
    return profile


def load_profile(path: Path | None = None, *, gpu: str | None = None) -> Profile:
    """The profile at `path` (default: `profile_path()`), of the GPU named `gpu` if one is given.

    Raises `ProfileMissing`, `ProfileMismatch` or `ProfileMalformed`, all `ProfileError`.
    """
    path = profile_path() if path is None else path
    try:
        profile = decode_profile(path.read_bytes())
    except FileNotFoundError as error:
        raise ProfileMissing(f"{path}: this machine has no profile: {_PROFILE_IT}") from error
    except OSError as error:
        raise ProfileMissing(f"{path}: cannot be read: {error.strerror}") from error
    except ProfileError as error:
        raise type(error)(f"{path}: {error}") from error
    if gpu is not None and profile.machine.gpu != gpu:
        raise ProfileMismatch(
            f"{path}: was measured on {profile.machine.gpu}, this is {gpu}: {_PROFILE_IT}"
        )
    return profile


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    """Write it whole or not at all, and say where.

    Raises `ProfileMalformed` for values that could not be loaded again, and `OSError`.
    """
    path = profile_path() if path is None else path
    data = encode_profile(profile)
    decode_profile(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".profile-", suffix=".json", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return path
